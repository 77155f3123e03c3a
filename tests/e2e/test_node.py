"""A client written in another language, by hand: what it saves, the SDK verifies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from client_sdk import Policy
from client_sdk.offline.saved import verify_saved
from tests.e2e.programs import MODEL, Served, environment

pytestmark = pytest.mark.model
CLIENT = Path(__file__).with_name("node_client.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed here")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_node_received_verifies(server: Served, policy: Policy, tmp_path: Path, stream: bool) -> None:
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France? Ü"}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": stream,
    }
    body, saved = tmp_path / "body.json", tmp_path / "answer"
    body.write_text(json.dumps(request, ensure_ascii=False), encoding="utf-8")
    saved.mkdir(mode=0o700)
    ran = subprocess.run(
        ["node", str(CLIENT), str(server.port), str(saved), str(body), os.urandom(32).hex(), os.urandom(32).hex()],
        env=environment({"POLICY_DIGEST": policy.digest.hex()}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    verified = verify_saved(saved, policy)
    assert verified.receipt.opened
    assert (verified.receipt.claims.stream is not None) is stream
    assert verified.attestation.holder_asserted
