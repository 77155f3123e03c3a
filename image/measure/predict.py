"""From a plan to reference values: read the inputs, compute each family, hold the result to the client's own rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from client_sdk.errors import PolicyFileError
from client_sdk.policy.policy import policy_from_reference
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.tee import pins
from image.measure import coverage, cpio, eif, eventlog, snp, tdvf, tdx, tpm, uki
from image.measure.errors import MeasureError
from image.measure.plan import NitroPlan, Plan, SnpPlan, TdxPlan, Tpm2Plan

PREDICTED, GIVEN, REQUIRED = "predicted from the image", "as given in the plan", "required"
LOGGED, COMPUTED = "replayed from the event log given", "computed from the firmware given"

_DISKS = "command line, and through its hash roots every byte of the root disk"
_NO_WEIGHTS = f"NOT the weights: the command line has no {coverage.MODEL_HASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value of a family: its name there, its bytes, where it comes from and what it covers, in words."""

    name: str
    value: bytes
    origin: str
    covers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`table` is the policy's; `caveats` are sentences for people. `covers_weights`: by hash tree or file digest."""

    name: str
    table: Mapping[str, object]
    values: tuple[Value, ...]
    covers_weights: bool
    caveats: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file that was measured: its part in the plan, not its path, and its SHA-256."""

    role: str
    sha256: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`reference` is what `appliance-client policy init --from` accepts."""

    reference: ReferenceValues
    families: tuple[Family, ...]
    inputs: tuple[Input, ...]


@dataclass(slots=True)
class _Inputs:
    """Reads files and remembers what was read: the inputs are published with the result."""

    read: dict[str, Input] = field(default_factory=dict)

    def take(self, role: str, path: Path) -> bytes:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MeasureError(f"{role}: {error.strerror or error}") from error
        self.read[role] = Input(role=role, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))
        return data


def predict(plan: Plan) -> Prediction:
    """All families of the plan. Raises MeasureError, also where a client would refuse the result as a policy."""
    inputs = _Inputs()
    image = None if plan.uki is None else uki.parse(inputs.take("uki.file", plan.uki))
    families: list[Family] = []
    if plan.tpm2 is not None and image is not None:
        families.append(_tpm2(plan.tpm2, image, inputs))
    if plan.snp is not None:
        families.append(_snp(plan.snp, inputs))
    if plan.tdx is not None and image is not None:
        families.append(_tdx(plan.tdx, image, inputs))
    if plan.nitro is not None:
        families.append(_nitro(plan.nitro, inputs))
    reference = ReferenceValues(
        source=plan.source,
        models=plan.models.models,
        config=plan.models.config,
        engine=plan.models.engine,
        arithmetic=plan.models.arithmetic,
        families={family.name: family.table for family in families},
    )
    try:
        policy_from_reference(ReferenceValues.parse(reference.to_toml()), unsafe_accept_insecure=False)
    except PolicyFileError as error:
        raise MeasureError(f"a client would refuse these values as a policy: {error}") from error
    return Prediction(reference=reference, families=tuple(families), inputs=tuple(inputs.read.values()))


def _weights(roots: coverage.Roots) -> str:
    return f"{_DISKS} and of the model disk" if roots.model is not None else f"{_DISKS}. {_NO_WEIGHTS}"


def _tpm2(plan: Tpm2Plan, image: uki.Uki, inputs: _Inputs) -> Family:
    roots = coverage.roots_of(image.cmdline)
    firmware = tpm.firmware_values(eventlog.parse(inputs.take("tpm2.event_log", plan.event_log), tpm.ALGORITHM))
    registers = {**firmware, **tpm.predict(image).values}
    covers = {
        0: "firmware code",
        2: "option ROMs",
        3: "option ROM settings",
        4: "unified kernel image and the kernel in it",
        6: "events of the platform's maker",
        7: "secure-boot state and keys",
        9: f"initrd; {_weights(roots)}",
        11: f"sections of the image: kernel, initrd, {_weights(roots)}",
        12: "no other command line, add-on or credential",
        13: "no system extension",
    }
    origin = dict.fromkeys(tpm.FIRMWARE, LOGGED) | dict.fromkeys(tpm.PREDICTED, PREDICTED)
    origin |= dict.fromkeys(tpm.ZERO, f"{REQUIRED}: zero")
    table: dict[str, object] = {"pcr_sets": [{str(n): registers[n].hex() for n in sorted(registers)}]}
    table |= {
        key: pins.hex_list(value)
        for key, value in (("ak_pins", plan.ak_pins), ("ak_roots", plan.ak_roots))
        if value is not None
    }
    table["allow_zero_pcrs"] = True  # so that 12 and 13 can be required zero
    return Family(
        name="tpm2",
        table=table,
        values=tuple(
            Value(name=f"PCR {n}", value=registers[n], origin=origin[n], covers=covers[n]) for n in sorted(registers)
        ),
        covers_weights=roots.model is not None,
        caveats=(
            "A TPM shows a measured boot, not memory encryption. PCR 1, 5, 8, 10, 14 and 15 are not pinned.",
            "Valid for a boot by the firmware's first boot option, without Secure Boot's own changes to PCR 7.",
        ),
    )


def _snp(plan: SnpPlan, inputs: _Inputs) -> Family:
    inputs.take("sev-snp.firmware", plan.firmware)
    if plan.boot is None:
        raise MeasureError(
            "sev-snp: without kernel, initrd and command line in it the measurement is the firmware's alone; it covers "
            "neither the image nor the weights, and is no reference for them"
        )
    kernel, initrd, cmdline_file = plan.boot
    inputs.take("sev-snp.kernel", kernel)
    inputs.take("sev-snp.initrd", initrd)
    cmdline = uki.parse_cmdline(inputs.take("sev-snp.cmdline", cmdline_file))
    roots = coverage.roots_of(cmdline)
    launches = snp.predict(plan.firmware, snp.Boot(kernel=kernel, initrd=initrd, cmdline=cmdline), plan.machines)
    covers = f"firmware, vCPUs as they start, kernel, initrd, {_weights(roots)}"
    return Family(
        name="sev-snp",
        table={"measurements": pins.hex_list({launch.measurement for launch in launches})},
        values=tuple(
            Value(
                name=f"launch measurement, {one.machine.vcpus} x {one.machine.vcpu_type}",
                value=one.measurement,
                origin="computed by sev-snp-measure",
                covers=covers,
            )
            for one in launches
        ),
        covers_weights=roots.model is not None,
        caveats=(
            "Not booted: nothing here ran on SEV-SNP hardware.",
            "The command line must reach the monitor exactly as here, without a newline.",
        ),
    )


def _tdx(plan: TdxPlan, image: uki.Uki, inputs: _Inputs) -> Family:
    roots = coverage.roots_of(image.cmdline)
    gpt = None if plan.boot_disk is None else tdx.gpt_content(inputs.take("tdx.boot_disk", plan.boot_disk))
    mrtd, mrtd_origin = plan.mrtd, GIVEN
    if isinstance(mrtd, Path):
        mrtd, mrtd_origin = tdvf.mrtd(inputs.take("tdx.firmware", mrtd), two_pass=plan.two_pass), COMPUTED
    rtmr0, rtmr0_origin = plan.rtmr0, GIVEN
    if isinstance(rtmr0, Path):
        rtmr0 = tdx.rtmr0_of(eventlog.parse(inputs.take("tdx.event_log", rtmr0), tdx.ALGORITHM))
        rtmr0_origin = LOGGED
    launch = tdx.predict(image, mrtd=mrtd, rtmr0=rtmr0, gpt=gpt)
    table = "no partition table" if gpt is None else "the boot disk's partition table"
    named = (
        ("mrtd", launch.mrtd, mrtd_origin, "firmware code"),
        ("rtmr0", launch.rtmr0, rtmr0_origin, "the machine's tables, secure-boot state, boot variables"),
        ("rtmr1", launch.rtmr1, PREDICTED, f"unified kernel image and the kernel in it; {table}"),
        ("rtmr2", launch.rtmr2, PREDICTED, f"sections of the image, initrd, {_weights(roots)}; nothing added to it"),
    )
    return Family(
        name="tdx",
        table={"measurements": [{name: value.hex() for name, value, _, _ in named}]},
        values=tuple(
            Value(name=name, value=value, origin=origin, covers=covers) for name, value, origin, covers in named
        ),
        covers_weights=roots.model is not None,
        caveats=("Not compared with the vendor's tool, not booted: nothing here ran on TDX hardware.",),
    )


def _nitro(plan: NitroPlan, inputs: _Inputs) -> Family:
    image = eif.read(inputs.take("nitro.eif", plan.eif))
    covers_weights = plan.weights is not None
    if plan.weights is not None:
        found = {digest for ramdisk in image.ramdisks for digest in cpio.file_digests(ramdisk).values()}
        missing = sorted(plan.weights - found)
        if missing:
            raise MeasureError(f"nitro.weights: no ramdisk has a file with SHA-256 {missing[0].hex()}")
    weights = (
        "the weights among them" if covers_weights else "NOT known to hold the weights: nitro.weights is not given"
    )
    pcrs = dict(zip(("pcr0", "pcr1", "pcr2"), image.pcrs(), strict=True))
    covers = {
        "pcr0": f"kernel, command line, all ramdisks, {weights}",
        "pcr1": "kernel, command line, first ramdisk",
        "pcr2": "ramdisks after the first (a constant where there is none)",
    }
    return Family(
        name="nitro",
        table={"measurements": [{name: value.hex() for name, value in pcrs.items()}]},
        values=tuple(Value(name=n, value=v, origin=PREDICTED, covers=covers[n]) for n, v in pcrs.items()),
        covers_weights=covers_weights,
        caveats=("Not compared with the vendor's tool, not booted: nothing here ran in a Nitro enclave.",),
    )
