"""`appliance models` as typed, and progress as shown."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.models import models
from appliance.models.progress import fractions, terminal_progress

GGUF = b"GGUF\x03\x00\x00\x00" + bytes(5000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def call(store: Path, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(models, ["--store", str(store), *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_add_list_verify_remove(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "tiny.gguf"
    path.write_bytes(GGUF)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    digest = hashlib.sha256(GGUF).hexdigest()
    assert "No models" in call(store, "list")
    spelled = f" SHA256:{digest.upper()} "
    call(
        store,
        "add",
        str(path),
        "--name",
        "tiny",
        "--sha256",
        spelled,
        "--licence",
        "MIT",
        "--chat-template",
        str(template),
    )
    assert digest in call(store, "list")
    (listed,) = json.loads(call(store, "list", "--json"))
    assert listed == {
        "name": "tiny",
        "sha256": digest,
        "size": len(GGUF),
        "licence": "MIT",
        "source": "file:tiny.gguf",
        "chat_template_sha256": hashlib.sha256(b"{{ messages }}").hexdigest(),
    }
    assert "tiny: ok" in call(store, "verify")
    blob = store / "blobs" / f"{digest}.gguf"
    blob.write_bytes(GGUF[:-1] + b"!")
    assert "it was changed" in call(store, "verify", "tiny", code=1)
    call(store, "remove", "tiny")
    assert not blob.exists()
    assert "not installed" in call(store, "remove", "tiny", code=1)


def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "tiny.gguf"
    path.write_bytes(GGUF)
    digest = hashlib.sha256(GGUF).hexdigest()
    assert "--sha256" in call(store, "add", str(path), "--name", "tiny", code=2)
    assert "64 hex digits" in call(store, "add", str(path), "--name", "tiny", "--sha256", digest[:16], code=1)
    assert "not a model name" in call(store, "add", str(path), "--name", "../x", "--sha256", digest, code=1)
    assert "cannot read" in call(store, "add", str(tmp_path / "no.gguf"), "--name", "x", "--sha256", digest, code=1)
    assert "as promised" in call(store, "add", str(path), "--name", "x", "--sha256", "0" * 64, code=1)
    assert "the catalogue has no model" in call(store, "pull", "nope", code=1)
    assert "Gemma Terms of Use" in call(store, "pull", "gemma-3-270m", code=1)
    assert "No models" in call(store, "list")


def test_catalogue_is_shown_with_whole_digests(tmp_path: Path) -> None:
    shown = call(tmp_path, "pull")
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" in shown
    assert "gemma-3-270m" in shown


def test_progress_off_a_terminal_is_a_line_per_tenth() -> None:
    out = io.StringIO()
    with terminal_progress(out) as progress:
        for done in range(1001):
            progress("hash", done, 1000)
        fractions(progress)("load", 1.0)
        progress("empty", 0, 0)
    assert out.getvalue().splitlines() == [*(f"hash: {10 * n} %" for n in range(11)), "load: 100 %", "empty: 100 %"]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with terminal_progress(out) as progress:
        progress("download", 500, 1000)
        progress("download", 1000, 1000)
    assert "download" in out.getvalue()
    assert "━" in out.getvalue()
