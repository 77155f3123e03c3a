"""Every family's table of a policy: closed, documented key by key with its default, and the same when read back."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_sdk.errors import PolicyFileError
from client_sdk.policy.policy import Policy
from client_sdk.tee.families import FAMILIES

DOCS = Path(__file__).parents[4] / "docs" / "families"
MODELS = f'version = 1\n[models]\n"m" = ["{"ab" * 32}"]\n'


def ones(size: int) -> list[str]:
    return ["11" * size]


BOOT = [dict.fromkeys("02479", "11" * 32)]
NITRO_SET = {f"pcr{register}": "11" * 48 for register in range(5)}
TDX_SET = {f"rtmr{register}": "11" * 48 for register in range(4)} | {"mrtd": "11" * 48}
SNP: dict[str, Any] = {
    "measurements": ones(48),
    "family_ids": ones(16),
    "image_ids": ones(16),
    "host_data": ones(32),
    "id_key_digests": ones(48),
    "author_key_digests": ones(48),
    "chip_ids": ones(64),
    "products": ["Genoa", "Turin"],
    "csp_ids": ["provider"],
    "allow_vmpl": [0, 2],
    "allow_debug": True,
    "allow_migration_agent": True,
    "allow_vlek": True,
    "require_crl": True,
    "min_tcb": {"Genoa": {"snp": 1}, "Turin": {"fmc": 2}},
    "min_guest_svn": 3,
    "min_abi": "1.55",
    "min_firmware": "1.55",
    "guest_required": ["single-socket"],
    "guest_forbidden": ["smt"],
    "platform_required": ["ecc"],
    "platform_forbidden": ["smt"],
}
DCAP: dict[str, Any] = {
    "allow_tcb_status": ["ConfigurationNeeded"],
    "platform_grace_period_s": 86_400,
    "qe_grace_period_s": 86_400,
    "reject_advisories": ["INTEL-SA-00615"],
    "min_tcb_evaluation_data_number": 17,
    "forbid_dynamic_platform": True,
    "forbid_cached_keys": True,
    "forbid_smt": True,
    "ppids": ones(16),
}
FULL: dict[str, dict[str, Any]] = {
    "sev-snp": SNP,
    "azure-snp-vtpm": SNP
    | {
        "pcr_sets": BOOT,
        "vm_ids": ["01234567-89AB-CDEF-0123-456789ABCDEF"],
        "allow_partial_boot": True,
        "allow_zero_pcrs": True,
        "require_secure_boot": True,
        "forbid_console": True,
        "require_safe_clock": True,
    },
    "tdx": DCAP
    | {
        "measurements": [TDX_SET],
        "allow_zero_rtmrs": True,
        "mr_config_id": ones(48),
        "mr_owner": ["zero"],
        "mr_owner_config": ["zero"],
        "mr_seam": ones(48),
        "mr_signer_seam": ["zero"],
        "td_attributes_set": "0000001000000000",
        "td_attributes_clear": "0100000000000000",
        "xfam_set": "0300000000000000",
        "xfam_clear": "0000000000000080",
        "require_event_log": True,
        "events": {"app-id": ["11"]},
    },
    "sgx": DCAP | {"mr_enclave": ones(32), "mr_signer": ones(32), "isv_prod_id": [0], "min_isv_svn": 0},
    "nitro": {
        "measurements": [NITRO_SET],
        "nitrotpm_measurements": [NITRO_SET],
        "module_ids": ["i-0"],
        "max_document_age_s": 60,
        "allow_debug": True,
    },
    "tpm2": {
        "ak_pins": ones(32),
        "ak_roots": ones(32),
        "pcr_sets": BOOT,
        "reset_counts": [1],
        "restart_counts": [1],
        "firmware_versions": ones(8),
        "require_safe_clock": True,
        "allow_partial_boot": True,
        "allow_zero_pcrs": True,
        "allow_any_certified_key": True,
    },
    "nvidia": {
        "count": 3,
        "gpus": 2,
        "switches": 1,
        "kinds": ["gpu", "switch"],
        "require_rim": True,
        "require_nras": True,
        "ocsp": "required",
        "architectures": ["hopper"],
        "driver_versions": ["580.159.03"],
        "vbios_versions": ["96.00.74.00.20"],
        "modes": ["ppcie"],
        "protected_pcie": True,
        "device_ids": ones(32),
        "firmware_ids": ones(48),
    },
}
NEEDED: dict[str, tuple[str, ...]] = {
    "sev-snp": ("measurements",),
    "azure-snp-vtpm": ("measurements", "pcr_sets"),
    "tdx": ("measurements",),
    "sgx": ("mr_enclave",),
    "nitro": ("measurements",),
    "tpm2": ("ak_pins", "pcr_sets"),
    "nvidia": (),
}
EVERY_KEY = [(family, key) for family, table in FULL.items() for key in table]


def parse(family: str, table: dict[str, Any]) -> dict[str, object]:
    return dict(FAMILIES[family].parse_policy(dict(table), f"families.{family}", report_only=False).to_table())


def documented(family: str) -> Iterator[tuple[str, str, str]]:
    """(key, form, default) of each row of the family's page; Azure's page adds to that of SEV-SNP."""
    page = "sev-snp" if family == "azure-snp-vtpm" else family
    sections = ("sev-snp", family) if family == "azure-snp-vtpm" else (family,)
    for section in sections:
        text = (DOCS / f"{page}.md").read_text().split(f"## Policy: `[families.{section}]`")[1].split("\n## ")[0]
        for line in text.splitlines():
            if line.startswith("| `"):
                keys, form, default = (cell.strip() for cell in line.strip("|").split(" | "))
                yield from ((key, form, default.strip("| ")) for key in re.findall(r"`(\w+)`", keys))


def test_every_family_is_here() -> None:
    assert set(FULL) == set(FAMILIES) - {"insecure"}


@pytest.mark.parametrize("family", FULL)
def test_every_key_is_documented_with_its_form_and_default_and_no_other(family: str) -> None:
    rows = list(documented(family))
    assert {key for key, _, _ in rows} == set(FULL[family])
    assert all(form and default for _, form, default in rows)


@pytest.mark.parametrize("family", FULL)
def test_the_documented_defaults_are_those_of_the_code(family: str) -> None:
    least = parse(family, {key: FULL[family][key] for key in NEEDED[family]})
    for key, _, default in documented(family):
        if key in NEEDED[family]:
            continue
        if default.startswith("false"):
            assert least.get(key, False) is False, key
        elif default.startswith("true"):
            assert least[key] is True, key
        elif re.match(r"\d+$", default):
            assert least[key] == int(default), key
        elif default.startswith("`") and default.endswith("`") and key != "kinds":
            assert least[key] == tomllib.loads(f"value = {default.strip('`')}")["value"], key
        elif key == "kinds":
            assert least[key] == ["gpu"], key
        else:
            assert key not in least, f"{key}: {default}"


@pytest.mark.parametrize("family", FULL)
def test_a_table_with_every_key_is_read_back_the_same_from_a_file(family: str) -> None:
    written = parse(family, FULL[family])
    assert set(written) == set(FULL[family])
    assert parse(family, written) == written
    demands = {family: FAMILIES[family].parse_policy(dict(FULL[family]), family, report_only=False)}
    if not FAMILIES[family].primary:
        demands["tpm2"] = FAMILIES["tpm2"].parse_policy(dict(FULL["tpm2"]), "tpm2", report_only=False)
    policy = Policy(models={"m": frozenset({b"\xab" * 32})}, families=demands)
    again = Policy.parse(policy.to_toml())
    assert again == policy
    assert again.digest == policy.digest


@pytest.mark.parametrize(("family", "key"), EVERY_KEY, ids=[f"{family}-{key}" for family, key in EVERY_KEY])
def test_b023_a_key_spelt_another_way_is_an_error_that_names_it(family: str, key: str) -> None:
    table = dict(FULL[family])
    for other in (f"{key}_", key.upper(), key.replace("_", "-") + "s", f" {key}"):
        with pytest.raises(PolicyFileError, match=re.escape(other)):
            parse(family, {**table, other: table[key]})


WRONG: list[object] = [
    None,
    "",
    " ",
    "any",
    "*",
    "true",
    "1",
    1.5,
    -1,
    [],
    {},
    [[]],
    [{}],
    [None],
    [""],
    ["any"],
    ["*"],
]


@pytest.mark.parametrize(("family", "key"), EVERY_KEY, ids=[f"{family}-{key}" for family, key in EVERY_KEY])
def test_b007_b031_b044_a_value_that_pins_nothing_is_an_error_that_names_its_key(family: str, key: str) -> None:
    for value in WRONG:
        with pytest.raises(PolicyFileError, match=key):
            parse(family, {**FULL[family], key: value})
    wanted = FULL[family][key]
    if wanted is True:
        wrong: list[object] = [1, "true", [True]]
    elif type(wanted) is int:
        wrong = [True, str(wanted), [wanted], 1 << 70]
    elif type(wanted) is list:
        wrong = [wanted[0], [*wanted, 1.5], [True]]
    else:
        wrong = [[wanted], True, 1]
    for value in wrong:
        with pytest.raises(PolicyFileError, match=key):
            parse(family, {**FULL[family], key: value})


PINS = [(family, key) for family, key in EVERY_KEY if str(FULL[family][key]).startswith("['1111")]
MAY_BE_ZERO = ("firmware_versions",)  # a number that some TPMs leave at zero, not a digest


@pytest.mark.parametrize(("family", "key"), PINS, ids=[f"{family}-{key}" for family, key in PINS])
def test_b031_pins_are_whole_and_not_zero(family: str, key: str) -> None:
    (pin,) = FULL[family][key]
    for value in (
        pin[:-1],
        pin[:-2],
        pin + "11",
        "00" * (len(pin) // 2) if key not in MAY_BE_ZERO else "",
        "zz" + pin[2:],
        "0x" + pin[2:],
        pin[:2] + " " + pin[3:],
    ):
        with pytest.raises(PolicyFileError, match=key):
            parse(family, {**FULL[family], key: [pin, value]})
    assert parse(family, {**FULL[family], key: [pin.upper()]}) == parse(family, FULL[family])


@pytest.mark.parametrize("family", [family for family, keys in NEEDED.items() if keys])
def test_b007_no_table_does_without_a_launch_measurement(family: str) -> None:
    for key in NEEDED[family]:
        for table in ({}, {other: FULL[family][other] for other in NEEDED[family] if other != key}):
            with pytest.raises(PolicyFileError):
                parse(family, table)
    trusted = {key: FULL[family][key] for key in ("ak_pins",) if key in FULL[family]}  # no measurement, but whose quote
    assert FAMILIES[family].parse_policy(dict(trusted), family, report_only=True)


@pytest.mark.parametrize("family", ["nitro", "tpm2"])
def test_the_example_is_a_policy(family: str) -> None:
    text = (DOCS / f"{family}.md").read_text()
    example = text.split("```toml\n")[1].split("```")[0]
    filled = re.sub(r"<(\d+) hex>", lambda found: "1" * int(found[1]), example)
    assert Policy.parse(MODELS + filled).families[family]
