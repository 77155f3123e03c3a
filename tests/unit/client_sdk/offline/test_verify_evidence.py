# ruff: noqa: E501
"""`appliance-client verify-evidence` over the genuine files: the verdict that each must get, by its id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client_sdk.cli.main import run
from client_sdk.tee import x509

V = Path(__file__).parents[3] / "vectors" / "tee"
MILAN, GENOA = "snp/chain_milan_ask_ark_asvk.pem", "snp/chain_genoa_ask_ark_asvk.pem"
UPTODATE = "tdx/v4_b0c06f_uptodate"
AZURE = [f"snp/genoa_v3_azure.{part}" for part in ("vcek.pem", "hcl-runtime.json", "vtpm-quote.msg", "vtpm-quote.sig")]
AK = "4105232bb9010b817822cf6ee6b0c249b38bf322cfdcefe4542ec53ecda25661"
TPM = json.loads((V / "tpm2/swtpm_pcrs.json").read_text())["nonce_hex"]
NV9 = "e97b23a1718095a0e9e35edca810768c70a6a5a389b705e753b197912bc11576"
ENCLAVE_TLS = x509.parse_certificates((V / "nitro/debug_2023-09-18_spki.tlscert.der").read_bytes())[0].spki.hex()

Case = tuple[str, str, str, list[str], str | None, str, list[str], int, str]
DEBUG = "allow_debug = true\n"
CASES: list[Case] = [
    # id, family, evidence, endorsements, now, keys of the family's table, more options, exit status, code
    ("snp-1", "snp", "snp/milan_v2_ok.report.bin", ["snp/milan_v2_ok.vcek.der", MILAN], "2025-06-01T00:00:00Z", "", [], 0, "OK"),
    ("snp-2-debug", "snp", "snp/milan_v2_debug.report.bin", ["snp/milan_v2_debug.vcek.der", MILAN], None, "", [], 10, "DEBUG_NOT_ALLOWED"),
    ("snp-6-vlek", "snp", "snp/milan_v3_vlek_aws.report.bin", ["snp/milan_v3_vlek_aws.vlek.der", MILAN], "2025-06-01T00:00:00Z", "", [], 10, "PLATFORM_NOT_ALLOWED"),
    ("snp-7", "snp", "snp/milan_v3_dstack.report.bin", ["snp/milan_v3_dstack.vcek.pem", MILAN], "2026-11-29T00:00:00Z", "", [], 0, "OK"),
    ("snp-8-genoa", "snp", "snp/genoa_v3_azure.report.bin", [AZURE[0], GENOA], "2026-11-29T00:00:00Z", "", [], 0, "OK"),
    ("snp-8-azure", "azure", "snp/genoa_v3_azure.report.bin", [*AZURE, GENOA], "2026-11-29T00:00:00Z", "", [], 0, "OK"),
    ("snp-9-wrongchain", "snp", "snp/genoa_v3_azure.report.bin", [AZURE[0], MILAN], "2026-11-29T00:00:00Z", "", [], 10, "CHAIN_NOT_TRUSTED"),
    ("snp-without-endorsements", "snp", "snp/milan_v3_dstack.report.bin", [], None, "", [], 20, "ENDORSEMENTS_MISSING"),
    ("tdx-1", "tdx", f"{UPTODATE}.quote.bin", [f"{UPTODATE}.collateral.json"], "2025-06-19T11:20:00Z", "", [], 0, "OK"),
    ("tdx-9-expired", "tdx", f"{UPTODATE}.quote.bin", [f"{UPTODATE}.collateral.json"], "2025-07-19T10:00:35Z", "", [], 10, "CERTIFICATE_NOT_VALID_NOW"),
    ("tdx-3", "tdx", "tdx/v5_90c06f_uptodate.quote.bin", ["tdx/90c06f_2026-02-18.collateral.json"], "1771498731", "", [], 0, "OK"),
    ("tdx-without-collateral", "tdx", f"{UPTODATE}.quote.bin", [], "1750332000", "", [], 20, "ENDORSEMENTS_MISSING"),
    ("sgx-1", "sgx", "sgx/v3_00a067_confswhardening.quote.bin", ["sgx/v3_00a067_confswhardening.collateral.json"], "2025-06-19T11:56:11Z", "", [], 10, "TCB_NOT_ALLOWED"),
    ("nitro-1", "nitro", "nitro/prod_2025-12-25a.cose.cbor", [], "2025-12-25T16:04:19Z", "", [], 0, "OK"),
    ("nitro-3-debug", "nitro", "nitro/debug_2025-12-25.cose.cbor", [], "2025-12-25T08:20:46Z", "", [], 10, "DEBUG_NOT_ALLOWED"),
    ("nitro-6-debug-spki", "nitro", "nitro/debug_2023-09-18_spki.cose.cbor", [], "2023-09-18T15:03:30Z", DEBUG, ["--report-data", ENCLAVE_TLS], 0, "OK"),
    ("nitro-6-other-key", "nitro", "nitro/debug_2023-09-18_spki.cose.cbor", [], "2023-09-18T15:03:30Z", DEBUG, ["--report-data", "00" * 91], 10, "EVIDENCE_BINDING"),
    ("nitro-7-expired", "nitro", "nitro/prod_2025-12-25a.cose.cbor", [], "2025-12-26T00:00:00Z", "", [], 10, "CERTIFICATE_NOT_VALID_NOW"),
    ("tpm-1", "tpm2", "tpm2/swtpm_quote.msg", ["tpm2/swtpm_quote.sig.der", "tpm2/swtpm_ak.tpm2b_public.bin"], None, f'ak_pins = ["{AK}"]\n', ["--nonce", TPM], 0, "OK"),
    ("tpm-1-pem", "tpm2", "tpm2/swtpm_quote.msg", ["tpm2/swtpm_quote.sig.der", "tpm2/swtpm_ak.pub.pem"], None, f'ak_pins = ["{AK}"]\n', [], 0, "OK"),
    ("tpm-incomplete", "tpm2", "tpm2/swtpm_quote.msg", ["tpm2/swtpm_quote.sig.der"], None, f'ak_pins = ["{AK}"]\n', [], 30, "MALFORMED_EVIDENCE"),
    ("nv-1", "nvidia", "nvidia/hopper_580.159.03.report.bin", ["nvidia/hopper_580.159.03.chain.pem"], None, "", [], 0, "OK"),
    ("nv-3", "nvidia", "nvidia/blackwell_575.32.report.bin", ["nvidia/blackwell_575.32.chain.pem"], None, "", [], 0, "OK"),
    ("nv-5", "nvidia", "nvidia/switch_ls10.report.bin", ["nvidia/switch_ls10.chain.pem"], None, "", [], 0, "OK"),
    ("nv-6-badsig", "nvidia", "nvidia/hopper_bad_signature.report.bin", ["nvidia/hopper_535.86.09.chain.pem"], None, "", [], 10, "BAD_SIGNATURE"),
    ("nv-9", "nvidia", "nvidia/hopper_590.12.evidence.json", [], None, "", ["--nonce", NV9], 0, "OK"),
    ("nv-9-other-nonce", "nvidia", "nvidia/hopper_590.12.evidence.json", [], None, "", ["--nonce", NV9[:-1] + "7"], 10, "NONCE_MISMATCH"),
    ("nv-11", "nvidia", "nvidia/switch_ls10.evidence.json", [], None, "", [], 0, "OK"),
    ("gramine", "certificate", "certificates/ratls_gramine.cert.pem", [], "2024-02-01T00:00:00Z", "", [], 10, "DEBUG_NOT_ALLOWED"),
    ("intel-sgxsdk", "certificate", "certificates/ratls_intel-sgxsdk.cert.pem", [], "2024-02-01T00:00:00Z", "", [], 10, "DEBUG_NOT_ALLOWED"),
    ("evervault", "certificate", "nitro/ratls_prod_2023-01-18.cert.pem", [], "2023-01-18T13:10:19Z", "", [], 0, "OK"),
    ("evervault-today", "certificate", "nitro/ratls_prod_2023-01-18.cert.pem", [], "2026-11-29T00:00:00Z", "", [], 10, "CERTIFICATE_NOT_VALID_NOW"),
    ("wrong-family", "tdx", "nitro/prod_2025-12-25a.cose.cbor", [], None, "", [], 30, "MALFORMED_EVIDENCE"),
]  # fmt: skip
TABLES = {"snp": "sev-snp", "azure": "azure-snp-vtpm"}


def judge(tmp_path: Path, case: Case, *more: str) -> int:
    _, family, evidence, endorsements, now, keys, options, _, _ = case
    policy = tmp_path / "policy.toml"
    names = ("sgx", "nitro") if family == "certificate" else (TABLES.get(family, family),)
    policy.write_text("version = 1\n" + "".join(f"[families.{name}]\n{keys}" for name in names))
    arguments = ["verify-evidence", "--family", family, "--evidence", str(V / evidence), "--policy", str(policy)]
    arguments += [word for path in endorsements for word in ("--endorsement", str(V / path))]
    arguments += [*(["--now", now] if now else []), *options, "--report-only", *more]
    return run(arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_verdict(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = judge(tmp_path, case, "--json")
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status, said["code"]) == (case[7], case[8]), said
    assert said["result"] == {0: "accept", 10: "reject", 20: "undecided", 30: "reject"}[status]
    asked = case[6][0].removeprefix("--") if case[6] and status == 0 else "not-checked"
    assert said["binding"] == ("key" if case[1] == "certificate" and status == 0 else asked)
    assert said["fresh"] is (asked == "nonce")
    assert len([check for check in said["checks"] if check["status"] == "failed"]) == (status in (10, 30))
    if status == 0:
        assert said["claims"]
        assert "warning" in said["message"] or asked != "not-checked"


def test_people_are_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(tmp_path, CASES[0]) == 0
    assert "warning: the binding was not checked" in capsys.readouterr().out


def test_usage(tmp_path: Path) -> None:
    case = CASES[0]
    for wrong in (
        ["--report-data", "00", "--nonce", "00"],
        ["--nonce", "xy"],
        ["--nonce", ""],
        ["--now", "yesterday"],
        ["--now", "nan"],
        ["--now", "2025-06-01T00:00:00"],
    ):
        assert judge(tmp_path, case, *wrong) == 2


def test_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.toml"
    arguments = ["verify-evidence", "--family", "snp", "--evidence", str(V / case_file()), "--policy", str(policy)]
    for text in ("version = 1\n", "version = 1\n[families.sev-snp]\n", "version = 1\nx = 1\n[families]\n"):
        policy.write_text(text)
        assert run(arguments) == 2
    policy.write_text("version = 1\n[families]\n[models]\n[limits]\n[certificate]\nmax_evidence_age_s = 9\n")
    assert run([*arguments, "--json"]) == 10
    assert "FAMILY_NOT_ALLOWED" in capsys.readouterr().out


def case_file() -> str:
    return "snp/milan_v2_ok.report.bin"


def test_a_device_twice_and_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = json.loads((V / "nvidia/hopper_590.12.evidence.json").read_text())
    doubled = tmp_path / "doubled.json"
    doubled.write_text(json.dumps(devices * 2))
    policy = tmp_path / "policy.toml"
    policy.write_text("version = 1\n[families.nvidia]\n")
    arguments = ["verify-evidence", "--family", "nvidia", "--policy", str(policy), "--report-only", "--json"]
    assert run([*arguments, "--evidence", str(doubled)]) == 10
    assert "DEVICE_NOT_ALLOWED" in capsys.readouterr().out
