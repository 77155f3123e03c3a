"""image/README.md against what there is: its commands, its settings, its plans, its files."""

from __future__ import annotations

import importlib.util
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from image.build import build
from image.init import settings
from image.ovmf import firmware

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "image/README.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", TEXT, re.MULTILINE) if block.strip()]


def test_every_target_that_is_named_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", TEXT) for word in line.split()}
    assert {"image", "ovmf", "eif", "oci", "image-check", "image-test"} <= named
    assert {word for word in named if word.startswith(("image", "ovmf", "eif", "oci"))} <= targets


def test_every_module_and_file_that_is_named_is_there() -> None:
    modules = set(re.findall(r"python -m (image[a-z.]*)", TEXT))
    assert modules
    assert all(importlib.util.find_spec(name) is not None for name in modules)
    files = set(re.findall(r"`((?:image|scripts)/[a-z0-9_/.]+\.[a-z]+)`", TEXT))
    assert files
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_outputs_are_named_as_they_are_made() -> None:
    images = {f"boot-{attester}.img" for attester in build.ATTESTERS} | {"boot-firmware-log.img"}
    assert set(re.findall(r"boot-[a-z-]+\.img", TEXT)) <= images
    assert set(re.findall(r"build/image-firmware/(\S+\.fd)", TEXT)) == {one.file for one in firmware.FIRMWARES}


def test_the_settings_shown_are_accepted() -> None:
    (shown,) = [block for block in BLOCKS if "settings.toml <<" in block]
    text = shown.split("<<'EOF'\n", 1)[1].split("\nEOF", 1)[0].replace("<64 hex>", "ab" * 32)
    parsed = settings.parse(text.encode() + b"\n")
    assert (parsed.port, len(parsed.api_keys)) == (8443, 1)


@pytest.mark.parametrize("family", ["sev-snp", "tdx", "nitro"])
def test_the_plans_shown_are_toml(family: str) -> None:
    shown = [block for block in BLOCKS if f"[{family}]" in block]
    assert len(shown) == 1
    assert family in tomllib.loads(shown[0])
