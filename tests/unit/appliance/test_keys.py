"""API keys: shown once, kept as digests, one answer for every bad one."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.keys import keys as keys_command
from appliance.errors import Forbidden, Unauthorized, Unavailable
from appliance.keys import SCOPES, Identity, KeyEntry, KeyFile, KeyFileError, KeyRing, UnknownKey, new_key

NOW = 1_800_000_000


class Draws:
    """Deterministic randomness: every draw differs."""

    def __init__(self) -> None:
        self._counter = count()

    def __call__(self, size: int) -> bytes:
        return hashlib.sha256(str(next(self._counter)).encode()).digest()[:size]


@pytest.fixture
def draw() -> Draws:
    return Draws()


def make(
    draw: Draws, *, scopes: frozenset[str] = frozenset({"inference"}), expires: int | None = None
) -> tuple[str, KeyEntry]:
    return new_key(label="a label", scopes=scopes, now=NOW, expires=expires, random_bytes=draw)


def test_a_key_is_256_bits_shown_once(draw: Draws, tmp_path: Path) -> None:
    text, entry = make(draw)
    assert text.startswith("ai-")
    assert len(text) == 46
    assert entry.sha256 == hashlib.sha256(text.encode()).digest()
    assert entry.key_id.startswith("key_")
    assert len(entry.key_id) == 16
    file = KeyFile(path=tmp_path / "keys.json")
    file.add(entry)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert text not in file.path.read_text()
    assert text[3:] not in repr(entry)


def test_a_live_key_with_the_scope_is_an_identity(draw: Draws) -> None:
    text, entry = make(draw)
    ring = KeyRing([make(draw)[1], entry, make(draw)[1]])
    for header in (f"Bearer {text}", f"bearer {text}", f"BEARER  {text}"):
        assert ring.authenticate(header, "inference", NOW) == Identity(key_id=entry.key_id, scopes=entry.scopes)


def test_every_bad_key_gets_the_same_answer(draw: Draws) -> None:
    text, entry = make(draw)
    expired_text, expired = make(draw, expires=NOW + 10)
    revoked_text, revoked = make(draw)
    ring = KeyRing([entry, expired, replace(revoked, revoked=NOW)])
    unknown, _ = make(draw)
    headers = [
        None,
        "",
        "Bearer",
        "Bearer ",
        text,
        f"Basic {text}",
        f"Bearer {text[:-1]}",
        f"Bearer {text}x",
        f"Bearer {text} ",
        f" Bearer {text}",
        f"Bearer {text}\n",
        f"Bearer {text.upper()}",
        f"Bearer {unknown}",
        f"Bearer {revoked_text}",
        f"Bearer {expired_text}",
        f"Bearer {entry.sha256.hex()}",
        "Bearer ai-" + "é" * 43,
    ]
    answers = set()
    for header in headers:
        with pytest.raises(Unauthorized) as caught:
            ring.authenticate(header, "inference", NOW + 10)
        answers.add((caught.value.code, caught.value.message, caught.value.param))
    assert len(answers) == 1
    assert next(iter(answers))[0] == "invalid_api_key"
    assert ring.authenticate(f"Bearer {expired_text}", "inference", NOW + 9).key_id == expired.key_id


def test_missing_scope_is_forbidden(draw: Draws) -> None:
    text, entry = make(draw, scopes=frozenset({"metrics"}))
    with pytest.raises(Forbidden) as caught:
        KeyRing([entry]).authenticate(f"Bearer {text}", "inference", NOW)
    assert caught.value.code == "insufficient_scope"


def test_every_entry_is_compared_whichever_matches(draw: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make(draw) for _ in range(5)]
    ring = KeyRing([entry for _, entry in made])
    compared = 0
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        nonlocal compared
        compared += 1
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for text, _ in made:
        ring.authenticate(f"Bearer {text}", "inference", NOW)
    for header in (None, "Bearer nonsense"):
        with pytest.raises(Unauthorized):
            ring.authenticate(header, "inference", NOW)
    assert compared == 7 * 5


def test_an_empty_ring_lets_nobody_in(draw: Draws) -> None:
    ring = KeyRing([])
    assert not ring.has_live_key(NOW)
    with pytest.raises(Unauthorized):
        ring.authenticate(f"Bearer {make(draw)[0]}", "inference", NOW)
    assert KeyRing([make(draw)[1]]).has_live_key(NOW)
    assert not KeyRing([make(draw, expires=NOW + 1)[1]]).has_live_key(NOW + 1)


def test_revocation_reaches_a_running_ring(draw: Draws, tmp_path: Path) -> None:
    file = KeyFile(path=tmp_path / "keys.json")
    text, entry = make(draw)
    file.add(entry)
    ring = KeyRing.load(file.path)
    assert ring.authenticate(f"Bearer {text}", "inference", NOW).key_id == entry.key_id
    assert file.revoke(entry.key_id, NOW + 1).revoked == NOW + 1
    with pytest.raises(Unauthorized):
        ring.authenticate(f"Bearer {text}", "inference", NOW + 1)
    assert file.revoke(entry.key_id, NOW + 9).revoked == NOW + 1
    other, second = make(draw)
    file.add(second)
    assert ring.authenticate(f"Bearer {other}", "inference", NOW).key_id == second.key_id
    with pytest.raises(UnknownKey):
        file.revoke("key_000000000000", NOW)


@pytest.mark.parametrize("damage", ["gone", "junk", "open"])
def test_a_running_ring_fails_closed(draw: Draws, tmp_path: Path, damage: str) -> None:
    file = KeyFile(path=tmp_path / "keys.json")
    text, entry = make(draw)
    file.add(entry)
    ring = KeyRing.load(file.path)
    if damage == "gone":
        file.path.unlink()
    else:
        data = file.path.read_bytes() + b" "
        file.path.write_bytes(b"{" if damage == "junk" else data)
        file.path.chmod(0o644 if damage == "open" else 0o600)
    for _ in range(2):
        with pytest.raises(Unavailable):
            ring.authenticate(f"Bearer {text}", "inference", NOW)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {**d, "version": 2},
        lambda d: {**d, "more": 1},
        lambda d: {**d, "keys": d["keys"] * 2},
        lambda d: {**d, "keys": [{**d["keys"][0], "scopes": []}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "scopes": ["root"]}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "scopes": [["inference"]]}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "expires": "never"}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "expires": True}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "sha256": "00"}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "id": "key_x"}]},
        lambda d: {**d, "keys": [{**d["keys"][0], "admin": True}]},
        lambda d: {**d, "keys": [{k: v for k, v in d["keys"][0].items() if k != "revoked"}]},
        lambda d: d["keys"],
    ],
)
def test_b180_a_key_file_with_any_fault_is_refused(draw: Draws, tmp_path: Path, change) -> None:
    file = KeyFile(path=tmp_path / "keys.json")
    file.add(make(draw)[1])
    KeyRing.load(file.path)
    file.path.write_text(json.dumps(change(json.loads(file.path.read_text()))))
    with pytest.raises(KeyFileError):
        KeyRing.load(file.path)
    with pytest.raises(KeyFileError):
        file.add(make(draw)[1])


def test_missing_and_open_key_files_are_refused(draw: Draws, tmp_path: Path) -> None:
    file = KeyFile(path=tmp_path / "keys.json")
    with pytest.raises(KeyFileError, match="keys new"):
        KeyRing.load(file.path)
    file.add(make(draw)[1])
    file.path.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyRing.load(file.path)


def test_bad_labels_scopes_and_expiries_are_refused(draw: Draws) -> None:
    good = {"label": "", "scopes": SCOPES, "now": NOW, "expires": None, "random_bytes": draw}
    new_key(**good)
    for bad in (
        {"scopes": frozenset()},
        {"scopes": frozenset({"root"})},
        {"label": "a\nb"},
        {"label": "x" * 129},
        {"expires": NOW},
    ):
        with pytest.raises(ValueError):
            new_key(**{**good, **bad})


def test_concurrent_tools_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code = "from appliance.cli.keys import keys; keys()"
    tools = [
        subprocess.Popen(
            [sys.executable, "-c", code, "--file", str(path), "new"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    texts = [tool.communicate()[0].decode().strip() for tool in tools]
    ring = KeyRing.load(path)
    assert len({ring.authenticate(f"Bearer {text}", "inference", 0).key_id for text in texts}) == 4


def test_command_line(tmp_path: Path) -> None:
    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(keys_command, ["--file", str(tmp_path / "keys.json"), *arguments])
        assert result.exit_code == code, result.output
        return result.output if code else result.stdout

    text = call("new", "--label", "[red]me", "--scope", "metrics", "--expires-days", "7").strip()
    (listed,) = json.loads(call("list", "--json"))
    assert (listed["label"], listed["scopes"], listed["state"]) == ("[red]me", ["metrics"], "live")
    assert listed["expires"] - listed["created"] == 7 * 86_400
    table = call("list")
    assert "[red]me" in table
    assert text not in table
    assert "revoked" in call("revoke", listed["id"])
    assert json.loads(call("list", "--json"))[0]["state"] == "revoked"
    assert "no key has the id" in call("revoke", "key_0", code=1)
    call("new", "--scope", "root", code=2)
