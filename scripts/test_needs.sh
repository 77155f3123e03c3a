#!/usr/bin/env bash
# Installs what some of the tests need of the system, where something is missing and this is root on Debian or Ubuntu;
# elsewhere, or with NO_INSTALL=1, names what is missing: the tests that need it are then skipped, each with the reason.
#
#   scripts/test_needs.sh [--has-tpm]      --has-tpm: install nothing; exit status 0 where a software TPM can be tested with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
missing=()
need() { # packages, then a command that succeeds where they are there
  local packages=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=($packages)
}
has() {
  local name
  for name; do command -v "$name" || return 1; done
}

need swtpm has swtpm
need "libtss2-dev pkg-config" pkg-config --exists tss2-esys
# tpm2-pytss is compiled.
need gcc has cc
need "$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')" \
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
if [[ ${1:-} == --has-tpm ]]; then
  ((${#missing[@]} == 0))
  exit
fi
need fuse3 has fusermount3
need openssl has openssl
need curl has curl
need cpio has cpio
need "skopeo umoci" has skopeo umoci
need "nodejs npm" has node npm
((${#missing[@]})) || exit 0

if [[ ${NO_INSTALL:-} ]] || ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "Not here, and not installed: ${missing[*]}. The tests that need them are left out; for them: apt-get install ${missing[*]}" >&2
  exit 0
fi
echo "Installing what the tests need of the system (NO_INSTALL=1 leaves it out): ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1; then
  # One that this release does not have, or a mirror that is not reached: the others all the same.
  for package in "${missing[@]}"; do
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
      echo "$package cannot be installed: the tests that need it are left out" >&2
  done
fi
