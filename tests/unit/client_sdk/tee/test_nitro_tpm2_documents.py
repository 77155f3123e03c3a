"""The policy tables of the published pages are those the code reads, and their examples are policies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from client_sdk.tee.families import FAMILIES
from client_sdk.tee.nitro.policy import NitroPolicy
from client_sdk.tee.nitro.policy import parse_policy as parse_nitro
from client_sdk.tee.tpm2.policy import Tpm2Policy
from client_sdk.tee.tpm2.policy import parse_policy as parse_tpm2

DOCS = Path(__file__).parents[4] / "docs" / "families"
NITRO_SET = {f"pcr{register}": "11" * 48 for register in range(5)}
FULL: dict[str, NitroPolicy | Tpm2Policy] = {
    "nitro": parse_nitro(
        {"measurements": [NITRO_SET], "nitrotpm_measurements": [NITRO_SET], "module_ids": ["i-0"]}, "nitro", False
    ),
    "tpm2": parse_tpm2(
        {
            "ak_pins": ["11" * 32],
            "ak_roots": ["11" * 32],
            "pcr_sets": [dict.fromkeys("02479", "11" * 32)],
            "reset_counts": [1],
            "restart_counts": [1],
            "firmware_versions": ["11" * 8],
        },
        "tpm2",
        False,
    ),
}


@pytest.mark.parametrize("family", FULL)
def test_every_key_of_the_policy_is_documented_and_no_other(family: str) -> None:
    text = (DOCS / f"{family}.md").read_text()
    section = text.split(f"## Policy: `[families.{family}]`")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert documented == set(FULL[family].to_table())


@pytest.mark.parametrize("family", FULL)
def test_the_example_is_a_policy(family: str) -> None:
    text = (DOCS / f"{family}.md").read_text()
    example = text.split("```toml\n")[1].split("```")[0]
    filled = re.sub(r"<(\d+) hex>", lambda found: "1" * int(found[1]), example)
    table: dict[str, Any] = tomllib.loads(filled)["families"][family]
    assert FAMILIES[family].parse_policy(table, family, report_only=False)
