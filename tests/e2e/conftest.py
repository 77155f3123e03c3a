"""One appliance for most tests: a real process with the real model, and the policy that pins it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from client_sdk import Policy
from tests.e2e.evidence import Collected
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, Served, make_policy


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A directory for the session; the model is in the store once it exists."""
    assert smollm2.exists()
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def policy_file(workspace: Path) -> Path:
    return make_policy(workspace / "policy")


@pytest.fixture(scope="session")
def policy(policy_file: Path) -> Policy:
    return Policy.load(policy_file)


@pytest.fixture(scope="session")
def server(workspace: Path) -> Iterator[Served]:
    """The appliance that nobody disturbs."""
    with Served(workspace / "server") as served:
        yield served


@pytest.fixture(scope="session")
def glass(workspace: Path) -> Iterator[GlassAppliance]:
    """An appliance in this process, whose keys a test may use and whose answers it may change on their way out."""
    with GlassAppliance(MODEL) as appliance:
        yield appliance


@pytest.fixture(scope="session")
def collected() -> Collected:
    """Live receipts, checkpoints and bundles of this session, for the format tests."""
    return Collected()
