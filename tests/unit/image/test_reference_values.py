"""From a plan to a policy: what a client accepts, what is refused, and the same result anywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.cli.main import run as client
from client_sdk.errors import PolicyError
from client_sdk.policy.policy import policy_from_reference
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.tee.evidence import Endorsements
from client_sdk.tee.tpm2.policy import Tpm2Policy
from client_sdk.tee.tpm2.verify import parse_evidence
from image.init import settings as operator_settings
from image.measure import eif, eventlog, outside, tdvf, tdx, tpm, uki
from image.measure.__main__ import main
from tests.simulators import software_tpm
from tests.unit.image import builders
from tests.unit.image.test_eif_snp import EIF
from tests.unit.image.test_registers import REAL_LOG

ROOT = Path(__file__).parents[3]
WEIGHTS = b"weights" * 99
AK_ROOT = "c3" * 32
PLAN = f"""
version = 1
source = "release 1.2.0"
models = "models.toml"

[uki]
file = "uki.efi"

[tpm2]
event_log = "log"
ak_roots = ["{AK_ROOT}"]

[sev-snp]
firmware = "AMDSEV.fd"
kernel = "vmlinuz"
initrd = "initrd"
cmdline = "cmdline"
vcpus = [1, 2]
vcpu_types = ["EPYC-Milan", "EPYC-Genoa"]
guest_features = 1

[tdx]
mrtd = "{"d4" * 48}"
rtmr0 = "{"e5" * 48}"
boot_disk = "esp.img"

[nitro]
eif = "appliance.eif"
weights = ["{hashlib.sha256(WEIGHTS).hexdigest()}"]
"""


def write_inputs(folder: Path, *, cmdline: str = builders.CMDLINE, plan: str = PLAN) -> Path:
    """All inputs of PLAN in `folder`; gives the plan's path."""
    folder.mkdir(parents=True, exist_ok=True)
    ramdisks = (builders.make_cpio({"init": b"init"}), builders.make_cpio({"weights": WEIGHTS}))
    files = {
        "models.toml": ReferenceValues(source="x", models={"tiny": b"m" * 32}, config=b"c" * 32).to_toml().encode(),
        "uki.efi": builders.make_uki(cmdline=cmdline.encode()),
        "log": builders.make_log(builders.firmware_entries()),
        "AMDSEV.fd": builders.make_ovmf(kernel_hashes=True),
        "vmlinuz": builders.make_kernel(),
        "initrd": builders.INITRD,
        "cmdline": cmdline.encode() + b"\n",
        "esp.img": builders.make_gpt_disk(1),
        "appliance.eif": eif.write(dataclasses.replace(EIF, ramdisks=ramdisks)),
        "plan.toml": plan.encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "plan.toml"


def run(plan: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The file written and the text printed."""
    assert main(["reference-values", str(plan), "--out", str(plan.parent / "out.toml")]) == 0
    return (plan.parent / "out.toml").read_text(), capsys.readouterr().out


def refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> str:
    out = plan.parent / "out.toml"
    assert main(["reference-values", str(plan), "--out", str(out)]) == 1
    assert not out.exists()
    message = capsys.readouterr().err
    assert message.startswith("refused: ")
    assert message.count("\n") == 1
    return message


def test_a_client_makes_a_policy_of_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, printed = run(write_inputs(tmp_path), capsys)
    policy = policy_from_reference(ReferenceValues.parse(text), unsafe_accept_insecure=False)
    assert set(policy.families) == {"tpm2", "sev-snp", "tdx", "nitro"}
    tables = {name: family.to_table() for name, family in policy.families.items()}
    (registers,) = tables["tpm2"]["pcr_sets"]  # type: ignore[misc]
    assert set(registers) == {"0", "2", "3", "4", "6", "7", "9", "11", "12", "13"}
    assert registers["12"] == registers["13"] == "00" * 32
    assert len(tables["sev-snp"]["measurements"]) == 4  # type: ignore[arg-type]
    for value in (registers["11"], tables["sev-snp"]["measurements"][0], "d4" * 48):  # type: ignore[index]
        assert value in printed
    assert printed.count("the weights are covered") == 4
    for sentence in ("Not booted", "Not compared with the vendor's tool, not booted", "not memory encryption"):
        assert sentence in printed


def test_registers_of_a_trust_domain_come_from_its_firmware_and_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PLAN.replace(f'mrtd = "{"d4" * 48}"', 'firmware = "tdvf.fd"').replace(
        f'rtmr0 = "{"e5" * 48}"', 'event_log = "ccel"'
    )
    path = write_inputs(tmp_path, plan=plan)
    (tmp_path / "tdvf.fd").write_bytes(builders.make_tdvf())
    (tmp_path / "ccel").write_bytes(REAL_LOG.read_bytes())
    text, printed = run(path, capsys)
    table = ReferenceValues.parse(text).families["tdx"]
    assert isinstance(table, dict)
    (launch,) = table["measurements"]
    assert launch["mrtd"] == tdvf.mrtd(builders.make_tdvf()).hex()
    assert launch["rtmr0"] == tdx.rtmr0_of(eventlog.parse(REAL_LOG.read_bytes(), "sha384")).hex()
    assert "computed from the firmware given" in printed
    path.write_text(plan.replace("[tdx]\n", "[tdx]\ntwo_pass = true\n"))
    assert launch["mrtd"] not in run(path, capsys)[0]


def test_the_client_s_own_command_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_inputs(tmp_path)
    run(plan, capsys)
    status = client(["policy", "init", "--from", str(tmp_path / "out.toml"), "--output", str(tmp_path / "policy.toml")])
    assert status == 0
    assert "[families.sev-snp]" in (tmp_path / "policy.toml").read_text()


def test_b178_same_inputs_elsewhere_give_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(write_inputs(tmp_path / "one"), capsys)
    old = os.umask(0o077)
    try:
        plan = write_inputs(tmp_path / "quite another" / "folder")
    finally:
        os.umask(old)
    for path in plan.parent.iterdir():
        os.utime(path, (86_400, 86_400))
        path.chmod(0o640)
    environment = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "HOME": "/"}
    done = subprocess.run(
        [sys.executable, "-m", "image.measure", "reference-values", plan.name, "--out", "out.toml"],
        cwd=plan.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ((plan.parent / "out.toml").read_text(), done.stdout) == first


def test_b178_inputs_are_published_by_part_and_digest_not_by_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_inputs(tmp_path)
    text, printed = run(plan, capsys)
    assert str(tmp_path) not in text + printed
    for name in ("uki.efi", "log", "AMDSEV.fd", "vmlinuz", "initrd", "cmdline", "esp.img", "appliance.eif"):
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() in printed


MEASURED: dict[str, Callable[[], bytes]] = {
    "kernel": lambda: builders.make_uki(kernel=builders.make_kernel(b"other code!")),
    "initrd": lambda: builders.make_uki(initrd=builders.INITRD + b"x"),
    "root disk": lambda: builders.make_uki(cmdline=builders.CMDLINE.replace(builders.ROOT, "a2" * 32).encode()),
    "model disk": lambda: builders.make_uki(cmdline=builders.CMDLINE.replace(builders.MODEL, "b3" * 32).encode()),
    "lockdown option": lambda: builders.make_uki(cmdline=(builders.CMDLINE + " lockdown=none").encode()),
    "environment by command line": lambda: builders.make_uki(cmdline=(builders.CMDLINE + " LD_PRELOAD=/x").encode()),
    "kernel release": lambda: builders.make_uki(uname=b"6.12.2-test"),
}


@pytest.mark.parametrize("setting", MEASURED)
def test_b179_each_setting_in_the_image_moves_a_pinned_register(setting: str) -> None:
    honest = tpm.predict(uki.parse(builders.make_uki())).values
    changed = tpm.predict(uki.parse(MEASURED[setting]())).values
    moved = {register for register, value in honest.items() if changed[register] != value}
    assert moved >= {4, 11}
    if setting != "kernel" and setting != "kernel release":
        assert 9 in moved


def test_b179_settings_outside_the_measurement_are_named_in_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed = run(write_inputs(tmp_path), capsys)
    assert len(outside.SETTINGS) >= 10
    for name, what in outside.SETTINGS.items():
        assert f"- {name}: {what}\n" in printed


def test_b179_no_operator_setting_is_left_unnamed() -> None:
    """What the image takes from the operator's disk is in the list of what no measurement covers, and nothing else."""
    named = {name.removeprefix("operator disk: ") for name in outside.SETTINGS if name.startswith("operator disk: ")}
    assert named == operator_settings._KEYS


def test_b179_a_command_line_added_from_outside_meets_a_register_required_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SMBIOS command line leaves 4 and 11 alone: the policy must hold 12 at zero by itself."""
    ours = f'ak_pins = ["{hashlib.sha256(software_tpm.public(software_tpm.Quote())).hexdigest()}"]'
    plan = PLAN.replace(f'ak_roots = ["{AK_ROOT}"]', ours)
    text, _ = run(write_inputs(tmp_path, plan=plan), capsys)
    policy = policy_from_reference(ReferenceValues.parse(text), unsafe_accept_insecure=False).families["tpm2"]
    (registers,) = policy.to_table()["pcr_sets"]  # type: ignore[misc]
    honest = {int(register): bytes.fromhex(value) for register, value in registers.items()}

    def appraise(pcrs: dict[int, bytes]) -> None:
        evidence = parse_evidence(software_tpm.item(software_tpm.Quote(pcrs=pcrs)))
        authentic = evidence.authenticate(CheckLog(), Endorsements(), now=software_tpm.NOW)
        assert isinstance(policy, Tpm2Policy)
        authentic.appraise(CheckLog(), policy, now=software_tpm.NOW)

    appraise(honest)
    for register in (12, 13):
        with pytest.raises(PolicyError):
            appraise(honest | {register: hashlib.sha256(bytes(32) + b"init=/bin/sh").digest()})
    with pytest.raises(PolicyError):
        appraise({register: value for register, value in honest.items() if register != 12})


def test_an_image_without_the_model_s_root_is_said_not_to_cover_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cmdline = builders.CMDLINE.partition(" appliance.model_hash")[0]
    plan = PLAN.partition("weights =")[0]
    _, printed = run(write_inputs(tmp_path, cmdline=cmdline, plan=plan), capsys)
    assert printed.count("the weights are NOT covered") == 4
    assert "the weights are covered" not in printed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("version = 1", "version = 2"), "version"),
        (("version = 1", "version = 1\nextra = 1"), "unknown keys: extra"),
        (("[uki]\n", "[uki]\nsection = 1\n"), "unknown keys: uki.section"),
        (("[tpm2]\n", "[tpm2]\npcrs = 1\n"), "unknown keys: tpm2.pcrs"),
        ((f'ak_roots = ["{AK_ROOT}"]', ""), "ak_pins or ak_roots"),
        (('kernel = "vmlinuz"\n', ""), "go together"),
        (('kernel = "vmlinuz"\ninitrd = "initrd"\ncmdline = "cmdline"\n', ""), "neither the image nor the weights"),
        (("guest_features = 1", ""), "guest_features are needed"),
        (("d4" * 48, "d4" * 47), "tdx.mrtd"),
        (("d4" * 48, "00" * 48), "tdx.mrtd"),
        (('event_log = "log"', 'event_log = "missing"'), "tpm2.event_log: No such file"),
        (('event_log = "log"', 'event_log = "initrd"'), "event log"),
        (('file = "uki.efi"', 'file = "vmlinuz"'), "no section .linux"),
        (('rtmr0 = "', 'event_log = "x"\nrtmr0 = "'), "exactly one of rtmr0 and event_log"),
        (("[tdx]\n", "[tdx]\ntwo_pass = true\n"), "only a computed MRTD"),
        (('[uki]\nfile = "uki.efi"\n', ""), "need [uki]"),
        ((hashlib.sha256(WEIGHTS).hexdigest(), "f6" * 32), "no ramdisk has a file with SHA-256 " + "f6" * 32),
        ((PLAN[PLAN.index("[tpm2]") :], ""), "no family"),
    ],
)
def test_a_plan_that_means_nothing_is_refused_in_one_line(
    change: tuple[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in PLAN
    assert why in refused(write_inputs(tmp_path, plan=PLAN.replace(*change)), capsys)


@pytest.mark.parametrize(
    ("cmdline", "why"),
    [
        ("console=ttyS0", "does not cover the root file system"),
        (builders.CMDLINE + f" appliance.root_hash={'a7' * 32}", "appliance.root_hash 2 times"),
        (builders.CMDLINE.replace(builders.MODEL, builders.MODEL[:-1]), "appliance.model_hash: 64"),
        (builders.CMDLINE.replace(builders.ROOT, "00" * 32), "appliance.root_hash: 64"),
    ],
)
def test_a_command_line_that_covers_no_disk_is_refused(
    cmdline: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(write_inputs(tmp_path, cmdline=cmdline), capsys)


def test_firmware_without_kernel_hashes_gives_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_inputs(tmp_path)
    (tmp_path / "AMDSEV.fd").write_bytes(builders.make_ovmf(kernel_hashes=False))
    assert "does not cover kernel, command line or weights" in refused(plan, capsys)


def test_values_that_already_have_measurements_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_inputs(tmp_path)
    with (tmp_path / "models.toml").open("a") as file:
        file.write("\n[families.nitro]\nx = 1\n")
    assert "launch measurements already" in refused(plan, capsys)


def test_eif_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("k", b"kernel"), ("c", b"reboot=k\n"), ("r", b"ramdisk")):
        (tmp_path / name).write_bytes(content)
    common = ["--name", "a", "--version", "1", "--kernel-version", "6", "--built", "2026"]
    files = ["--kernel", str(tmp_path / "k"), "--cmdline", str(tmp_path / "c"), "--ramdisk", str(tmp_path / "r")]
    assert main(["eif", *files, *common, "--out", str(tmp_path / "one.eif")]) == 0
    printed = capsys.readouterr().out
    found = eif.read((tmp_path / "one.eif").read_bytes())
    assert printed == "".join(f"PCR{n} {value.hex()}\n" for n, value in enumerate(found.pcrs()))
    assert main(["eif", *files, *common, "--out", str(tmp_path / "two.eif")]) == 0
    assert (tmp_path / "one.eif").read_bytes() == (tmp_path / "two.eif").read_bytes()


def test_check_log_names_the_registers_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_inputs(tmp_path)
    assert main(["check-log", str(tmp_path / "uki.efi"), str(tmp_path / "log")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["register 4", "register 9", "register 11"]
