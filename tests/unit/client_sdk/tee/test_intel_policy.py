"""What `[families.tdx]` and `[families.sgx]` may say: full pins, closed tables, the same table back."""

from __future__ import annotations

import tomllib

import pytest

from client_sdk.errors import PolicyFileError
from client_sdk.policy.policy import Policy
from client_sdk.tee.families import FAMILIES

MR = "4d" * 48
SET = {"mrtd": MR, "rtmr0": "a0" * 48, "rtmr1": "a1" * 48, "rtmr2": "a2" * 48}
STATUS = {
    "allow_tcb_status": ["ConfigurationNeeded", "SWHardeningNeeded"],
    "reject_advisories": ["INTEL-SA-00615"],
    "platform_grace_period_s": 86_400,
    "qe_grace_period_s": 3600,
    "min_tcb_evaluation_data_number": 17,
    "forbid_dynamic_platform": True,
    "forbid_cached_keys": True,
    "forbid_smt": True,
    "ppids": ["0a" * 16],
}
FULL_TDX = {
    "measurements": [{**SET, "rtmr3": "zero"}],
    "allow_zero_rtmrs": True,
    "mr_config_id": ["zero", MR],
    "mr_owner": [MR],
    "mr_owner_config": [MR],
    "mr_seam": [MR],
    "mr_signer_seam": ["zero"],
    "td_attributes_set": "0000001000000000",
    "td_attributes_clear": "0000000000000080",
    "xfam_set": "0300000000000000",
    "xfam_clear": "0000020000000000",
    "require_event_log": True,
    "events": {"compose-hash": ["01" * 32, "02"]},
    **STATUS,
}
FULL_SGX = {
    "mr_enclave": ["e1" * 32],
    "mr_signer": ["51" * 32],
    "isv_prod_id": [0, 7],
    "min_isv_svn": 0,
    **STATUS,
}


@pytest.mark.parametrize(("name", "table"), [("tdx", FULL_TDX), ("sgx", FULL_SGX)])
def test_a_table_comes_back_as_it_was(name: str, table: dict[str, object]) -> None:
    parsed = FAMILIES[name].parse_policy(dict(table), name, report_only=False)
    assert dict(parsed.to_table()) == table
    assert parsed.count == 1
    policy = Policy(models={"m": frozenset({b"\x01" * 32})}, families={name: parsed})
    again = Policy.parse(policy.to_toml())
    assert again.digest == policy.digest
    assert tomllib.loads(policy.to_toml())["families"][name] == table


@pytest.mark.parametrize(("name", "least"), [("tdx", {"measurements": [SET]}), ("sgx", {"mr_enclave": ["e1" * 32]})])
def test_the_least_table_is_a_launch_measurement(name: str, least: dict[str, object]) -> None:
    parsed = FAMILIES[name].parse_policy(dict(least), name, report_only=False)
    assert dict(parsed.to_table()) == least
    with pytest.raises(PolicyFileError, match="needed"):
        FAMILIES[name].parse_policy({}, name, report_only=False)
    assert dict(FAMILIES[name].parse_policy({}, name, report_only=True).to_table()) == {}


def without(key: str) -> dict[str, str]:
    return {name: value for name, value in SET.items() if name != key}


@pytest.mark.parametrize(
    "table",
    [
        {"measurements": []},
        {"measurements": {}},
        {"measurements": [SET, "any"]},
        *({"measurements": [without(key)]} for key in SET),
        *({"measurements": [{**SET, key: "00" * 48}]} for key in SET),
        *({"measurements": [{**SET, key: "zero"}]} for key in SET),
        {"measurements": [{**SET, "mrtd": "zero"}], "allow_zero_rtmrs": True},
        {"measurements": [{**SET, "mrtd": MR[:-2]}]},
        {"measurements": [{**SET, "rtmr3": "00" * 48}]},
        {"measurements": [{**SET, "rtmr4": MR}]},
        {"mr_config_id": []},
        {"mr_config_id": MR},
        {"mr_config_id": ["00" * 48]},
        {"mr_seam": ["*"]},
        {"td_attributes_set": "00" * 8},
        {"td_attributes_set": "01"},
        {"td_attributes_set": "01" * 8, "td_attributes_clear": "01" * 8},
        {"xfam_set": "01" * 8, "xfam_clear": "01" * 8},
        {"events": {}},
        {"events": ["compose-hash"]},
        {"events": {"compose-hash": []}},
        {"events": {"compose-hash": [""]}},
        {"events": {"compose-hash": ["0"]}},
        {"events": {"compose-hash": [1]}},
        {"events": {"compose-hash": ["01" * 5000]}},
        {"require_event_log": 1},
        {"measurement": MR},
        {"mr_enclave": ["e1" * 32]},
    ],
)
def test_b007_b023_b031_what_pins_nothing_in_a_tdx_table_is_an_error(table: dict[str, object]) -> None:
    with pytest.raises(PolicyFileError, match=r"families\.tdx"):
        FAMILIES["tdx"].parse_policy({"measurements": [SET], **table}, "families.tdx", report_only=False)


@pytest.mark.parametrize(
    "table",
    [
        {"mr_enclave": []},
        {"mr_enclave": ["00" * 32]},
        {"mr_enclave": ["e1" * 31]},
        {"mr_signer": ["51" * 32]},
        {"mr_signer": ["51" * 32], "isv_prod_id": [1]},
        {"mr_signer": ["51" * 32], "min_isv_svn": 1},
        {"isv_prod_id": [1], "min_isv_svn": 1},
        {"mr_enclave": ["e1" * 32], "isv_prod_id": [65_536]},
        {"mr_enclave": ["e1" * 32], "debug": True},
        {"mr_enclave": ["e1" * 32], "measurements": [SET]},
    ],
)
def test_b007_b023_b031_what_pins_nothing_in_an_sgx_table_is_an_error(table: dict[str, object]) -> None:
    with pytest.raises(PolicyFileError, match=r"families\.sgx"):
        FAMILIES["sgx"].parse_policy(table, "families.sgx", report_only=False)


@pytest.mark.parametrize(
    "table",
    [
        {"allow_tcb_status": ["Revoked"]},
        {"allow_tcb_status": ["UpToDate"]},
        {"allow_tcb_status": ["any"]},
        {"allow_tcb_status": ["outofdate"]},
        {"allow_tcb_status": []},
        {"reject_advisories": ["SA-615"]},
        {"reject_advisories": ["INTEL-SA-*"]},
        {"platform_grace_period_s": 0},
        {"platform_grace_period_s": 10**9},
        {"qe_grace_period_s": True},
        {"allow_tcb_status": ["OutOfDate"], "platform_grace_period_s": 1},
        {"allow_tcb_status": ["OutOfDate"], "qe_grace_period_s": 1},
        {"min_tcb_evaluation_data_number": 0},
        {"forbid_smt": "yes"},
        {"ppids": ["00" * 16]},
        {"ppids": ["0a" * 15]},
        {"ppids": []},
    ],
)
def test_b044_what_a_status_policy_cannot_mean_is_an_error(table: dict[str, object]) -> None:
    for name, least in (("tdx", {"measurements": [SET]}), ("sgx", {"mr_enclave": ["e1" * 32]})):
        with pytest.raises(PolicyFileError, match=f"families.{name}"):
            FAMILIES[name].parse_policy({**least, **table}, f"families.{name}", report_only=False)
