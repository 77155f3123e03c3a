# Everything a newcomer types. Each target says what it does before it is slow; a second run is quick.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
LISTEN ?= 127.0.0.1:8443
MODEL ?= smollm2-135m-instruct

# tpm2-pytss compiles against a library of the system and Python's headers; without them a few tests are left out, and say so.
# Asked anew each time: scripts/test_needs.sh may have installed them in between.
TPM_EXTRA = $(shell scripts/test_needs.sh --has-tpm && echo ,tpm2)
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
PIP_INSTALL = $(PY) -m pip install -v -c constraints.txt

.PHONY: help
help: ## show this list
	@echo "Confidential inference with a receipt for every answer. Start with: make demo"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10 | sed 's/^/  make /'

.PHONY: venv
venv: $(VENV)/.installed ## make .venv and install the appliance and the SDK in it

$(VENV)/.made:
	@python=""; \
	for candidate in python3 python3.13 python3.12 python3.11; do \
		if command -v $$candidate >/dev/null && $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "No Python >= 3.11 with venv found. Install one, for example: apt-get install python3 python3-venv" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip
	@touch $@

# llama.cpp with kernels of our own (native/llama_cpp): one wheel for every x86-64-v3 processor, compiled once.
$(VENV)/.engine: $(VENV)/.made scripts/engine_wheel.py scripts/engine_proof.py native/attested-1.json image/lock.toml $(wildcard native/llama_cpp/*)
	@if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then \
		echo "No C++ compiler found, and llama-cpp-python compiles from source. Install one, for example: apt-get install g++" >&2; exit 1; \
	fi
	@echo "Installing llama.cpp into $(VENV) (the first time it is compiled, about two minutes on two cores)"
	@$(PY) -m pip install --quiet -c constraints.txt numpy diskcache jinja2 typing-extensions
	@$(PY) scripts/engine_wheel.py --install --log $(VENV)/install-engine.log >/dev/null
	@touch $@

$(VENV)/.installed: $(VENV)/.engine pyproject.toml constraints.txt
	@echo "Installing the appliance and the SDK into $(VENV)"
	@$(PIP_INSTALL) -e '.[demo]' 2>&1 | $(PY) scripts/pip_progress.py $(VENV)/install.log || \
		{ tail -n 40 $(VENV)/install.log >&2; echo "The installation failed; its whole log is $(VENV)/install.log" >&2; exit 1; }
	@touch $@

.PHONY: test-needs
test-needs:
	@scripts/test_needs.sh

$(VENV)/.installed-test: $(VENV)/.installed | test-needs
	@if [ -z "$(TPM_EXTRA)" ]; then \
		echo "No software TPM here, so the tests that quote with one are left out. For them: apt-get install swtpm libtss2-dev pkg-config python3-dev, then make clean" >&2; \
	fi
	@echo "Installing what the tests need"
	@$(PIP_INSTALL) -e '.[demo,test$(TPM_EXTRA)]' 2>&1 | $(PY) scripts/pip_progress.py $(VENV)/install-test.log || \
		{ tail -n 40 $(VENV)/install-test.log >&2; echo "The installation failed; its whole log is $(VENV)/install-test.log" >&2; exit 1; }
	@touch $@

.PHONY: demo
demo: venv ## attest an appliance, ask it, verify the receipt, then tamper and see it rejected
	@$(PY) -m appliance.cli.demo

.PHONY: serve
serve: venv ## an appliance on this machine to play with (LISTEN=host:port MODEL=name)
	@$(PY) -m appliance models pull $(MODEL)
	@exec $(PY) -m appliance serve --attester insecure --model $(MODEL) --listen $(LISTEN)

.PHONY: test
test: $(VENV)/.installed-test ## run all tests
	@$(PY) -m pytest

.PHONY: vsock-test
vsock-test: $(VENV)/.installed-test ## attest, ask and stream over real AF_VSOCK, in a guest (User Mode Linux, else QEMU)
	@$(PY) -m appliance models pull smollm2-135m-instruct
	@scripts/vsock/run_guest.sh

.PHONY: image
image: image-venv ## the appliance's image from locked inputs (as root; in build/image)
	@scripts/image/needs.sh build
	@$(PY) -m appliance models pull $(MODEL)
	@$(PY) -m image.build build --model $(MODEL)

.PHONY: image-check
image-check: image-venv ## build the image twice, in two folders, and compare every byte
	@scripts/image/needs.sh check
	@$(PY) -m appliance models pull $(MODEL)
	@$(PY) -m image.build check --model $(MODEL) --compile-again

.PHONY: image-test
image-test: ## boot the image under QEMU with a software TPM, ask it, tamper (a small model's disk; MODEL=name: its own)
	@scripts/image/needs.sh test
	@$(MAKE) --no-print-directory image-venv
	@$(PY) -c 'import tpm2_pytss' 2>/dev/null || $(PIP_INSTALL) -q -e '.[tpm2]'
	@test -f build/image/SHA256SUMS || $(MAKE) --no-print-directory image
ifeq ($(origin MODEL),file)
	@$(PY) -m appliance models pull smollm2-135m-instruct
	@$(PY) -m tests.small_llama build/image-test-store
	@$(PY) -m image.boottest --model small-llama --store build/image-test-store --swap-model
else
	@$(PY) -m image.boottest --model $(MODEL)
endif

.PHONY: image-relock
image-relock: image-venv ## renew image/lock.toml: newer packages, and so another measurement
	@scripts/image/needs.sh build
	@$(PY) -m image.build relock
	@$(PY) -m image.ovmf relock

.PHONY: image-venv
image-venv: $(VENV)/.installed-test

.PHONY: ovmf
ovmf: image-venv ## firmware for SEV-SNP and TDX from Debian's edk2 source (as root; in build/image-firmware)
	@scripts/image/needs.sh build
	@$(PY) -m image.ovmf build

.PHONY: ovmf-check
ovmf-check: image-venv ## build the firmware twice and compare
	@scripts/image/needs.sh build
	@$(PY) -m image.ovmf check

.PHONY: ovmf-test
ovmf-test: image-venv ## start the firmware in QEMU, without a TEE: what it starts, what it refuses
	@scripts/image/needs.sh test
	@test -f build/image/SHA256SUMS || $(MAKE) --no-print-directory image
	@test -f build/image-firmware/firmware.json || $(MAKE) --no-print-directory ovmf
	@$(PY) -m image.ovmf test

.PHONY: eif
eif: image-venv ## enclave image file for AWS Nitro, from what make image made (in build/image-eif)
	@test -f build/image/SHA256SUMS || $(MAKE) --no-print-directory image
	@$(PY) -m image.eif --version $(VERSION) --model $(MODEL)

.PHONY: eif-test
eif-test: image-venv ## boot what the enclave image file holds, in QEMU, up to where only an enclave could go on
	@scripts/image/needs.sh test
	@test -f build/image-eif/appliance.eif || $(MAKE) --no-print-directory eif
	@$(PY) -m image.eif.trial

.PHONY: oci
oci: image-venv ## container image (OCI layout archive), from what make image made (in build/image-oci)
	@test -f build/image/SHA256SUMS || $(MAKE) --no-print-directory image
	@$(PY) -m image.oci --version $(VERSION) --model $(MODEL)

.PHONY: check
check: $(VENV)/.installed-test ## formatting, lint, types, import rules
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

.PHONY: bench
bench: $(VENV)/.installed-test ## run the benchmarks and print their ratios
	@for bench in tests/bench/bench_*.py; do echo "== $$bench"; $(PY) $$bench; done

.PHONY: clean
clean: ## remove .venv, builds and caches (models stay in the user's model store)
	rm -rf $(VENV) build dist demo-output ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find appliance client_sdk tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
