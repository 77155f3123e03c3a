"""How long to fuzz: a few seconds in every run, as long as you like with ATTESTED_FUZZ_SECONDS."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def fuzz_seconds() -> float:
    return float(os.environ.get("ATTESTED_FUZZ_SECONDS", "2"))
