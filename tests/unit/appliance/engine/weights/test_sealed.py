from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from appliance.engine.weights.sealed import seal_model
from appliance.errors import BootError


def seal(path: Path, content: bytes, **changes: object) -> object:
    expected = {"sha256": hashlib.sha256(content).digest(), "size_bytes": len(content)} | changes
    return seal_model([path], progress=lambda fraction: None, **expected)  # type: ignore[arg-type]


def overwrite(fd: int, flags: int) -> None:
    again = os.open(f"/proc/self/fd/{fd}", flags)
    try:
        os.pwrite(again, b"x", 0)
    finally:
        os.close(again)


@pytest.fixture
def content() -> bytes:
    return bytes(range(256)) * 40_000  # more than two chunks


def test_parts_are_joined_hashed_and_sealed(tmp_path: Path, content: bytes) -> None:
    parts = [tmp_path / "one", tmp_path / "two"]
    parts[0].write_bytes(content[:5_000_001])
    parts[1].write_bytes(content[5_000_001:])
    fractions: list[float] = []
    digest = hashlib.sha256(content).digest()
    model = seal_model(parts, sha256=digest, size_bytes=len(content), progress=fractions.append)
    try:
        assert model.sha256 == digest
        assert os.pread(model.fd, len(content) + 1, 0) == content
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        with pytest.raises(OSError):
            os.pwrite(model.fd, b"x", 0)
        for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(PermissionError):  # EPERM: the seal, not the file mode
                overwrite(model.fd, flags)
    finally:
        model.close()


def test_b166_swapping_the_file_afterwards_changes_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    model = seal_model(
        [path], sha256=hashlib.sha256(content).digest(), size_bytes=len(content), progress=lambda f: None
    )
    try:
        path.write_bytes(b"evil" * 100)
        other = tmp_path / "other"
        other.write_bytes(b"evil" * 100)
        path.unlink()
        path.symlink_to(other)
        assert os.pread(model.fd, len(content), 0) == content
    finally:
        model.close()


def test_b165_a_flipped_byte_is_refused_with_both_digests(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    flipped = bytes([content[0] ^ 1]) + content[1:]
    path.write_bytes(flipped)
    with pytest.raises(BootError) as caught:
        seal(path, content)
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert hashlib.sha256(flipped).hexdigest() in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1])
def test_short_and_grown_files_are_refused(tmp_path: Path, content: bytes, change: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BootError, match=str(len(content) - change)):
        seal(path, content, size_bytes=len(content) - change)


def test_only_regular_readable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("fifo", "not a regular file"), ("missing", "cannot open"), (".", "not a regular file")):
        with pytest.raises(BootError, match=message):
            seal(tmp_path / name, b"x")
