"""What the test boots and compares with: operator settings, reference values, disks with one byte changed."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client_sdk.policy.policy import Policy
from image.boottest.errors import BootTestError
from image.boottest.machine import Shape, boot
from image.build import settings_disk
from image.measure import plan, predict

_LOG = re.compile(r"FIRMWARE-LOG-BEGIN\s(.*?)FIRMWARE-LOG-END", re.DOTALL)
_BOOT_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """`built` is a build's folder, `image` that or one made from it with the model `model` of `store`, `work` the
    test's own.
    """

    built: Path
    image: Path
    work: Path
    store: Path
    model: str
    environ: Mapping[str, str]

    @property
    def tpm_state(self) -> Path:
        """Where the seeds of the machine's TPM are."""
        return self.work / "tpm-state"

    @property
    def disks(self) -> tuple[Path, ...]:
        return (self.image / "root.img", self.image / "model.img", self.work / "settings.img")

    @property
    def is_swapped(self) -> bool:
        """Whether the model is another one than the image was built with."""
        return self.image != self.built


def write_settings(work: Path, random_bytes: bytes, now: int) -> str:
    """The operator's disk with one new API key; returns the key's text. `random_bytes` are 38."""
    text = "ai-" + base64.urlsafe_b64encode(random_bytes[:32]).rstrip(b"=").decode()
    lines = [
        "# attested-inference settings 1",
        "port = 8443",
        "[[api_keys]]",
        f'id = "key_{random_bytes[32:].hex()}"',
        f'sha256 = "{hashlib.sha256(text.encode()).hexdigest()}"',
        'label = "boot test"',
        'scopes = ["inference", "receipts"]',
        f"created = {now}",
    ]
    (work / "settings.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings_disk.write(work / "settings.toml", work / "settings.img")
    return text


def attestation_key(material: Material) -> str:
    """SHA-256 of the TPM's attestation key, from the TPM itself before anything boots: what an owner would pin."""
    material.tpm_state.mkdir(parents=True, exist_ok=True)
    port = _two_ports()
    command = ["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={material.tpm_state.resolve()}"]
    command += ["--server", f"type=tcp,port={port},bindaddr=127.0.0.1"]
    command += ["--ctrl", f"type=tcp,port={port + 1},bindaddr=127.0.0.1", "--flags", "not-need-init,startup-clear"]
    tpm = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port + 1)
        environ = {**material.environ, "APPLIANCE_ATTESTATION_TPM2_TCTI": f"swtpm:host=127.0.0.1,port={port}"}
        environ["APPLIANCE_STORE_MODELS_DIR"] = str(material.store)
        arguments = [sys.executable, "-m", "appliance", "reference-values", "--attester", "tpm2", "--on-this-machine"]
        config = material.image / "appliance.toml"
        done = subprocess.run(
            [*arguments, "--config", str(config), "--model", material.model],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        tpm.terminate()
        tpm.wait(20)
    if done.returncode != 0:
        raise BootTestError(f"the TPM tells no attestation key: {done.stderr.strip()}")
    (pin,) = tomllib.loads(done.stdout)["families"]["tpm2"]["ak_pins"]
    return str(pin)


def _two_ports() -> int:
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise BootTestError("swtpm does not listen")


def firmware_log(material: Material) -> Path:
    """The measurement log of this firmware, from a boot that does nothing else."""
    shape = Shape(boot=material.image / "boot-firmware-log.img", disks=material.disks)
    with boot(shape, tpm_state=material.tpm_state, folder=material.work / "firmware-log") as machine:
        machine.wait_for("FIRMWARE-LOG-END", _BOOT_LIMIT_S)
        console = machine.console
    found = _LOG.search(console)
    if found is None:
        raise BootTestError("the firmware's log is not on the console")
    path = material.work / "firmware.log"
    path.write_bytes(base64.b64decode("".join(found[1].split())))
    return path


def make_policy(material: Material, log: Path, ak_pin: str) -> Policy:
    """By the way that callers go: plan, reference-values.toml, `appliance-client policy init`."""
    image = material.image.resolve()
    lines = [
        "version = 1",
        'source = "boot test"',
        f'models = "{image}/models-tpm2.toml"',
        "[uki]",
        f'file = "{image}/appliance-tpm2.efi"',
        "[tpm2]",
        f'event_log = "{log.resolve()}"',
        f'ak_pins = ["{ak_pin}"]',
    ]
    (material.work / "plan.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    reference = material.work / "reference-values.toml"
    reference.write_text(predict.predict(plan.load(material.work / "plan.toml")).reference.to_toml(), encoding="utf-8")
    policy = material.work / "policy.toml"
    policy.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "client_sdk.cli.main",
        "policy",
        "init",
        "--from",
        str(reference),
        "-o",
        str(policy),
    ]
    done = subprocess.run(command, env=dict(material.environ), capture_output=True, text=True, check=False)
    if done.returncode != 0 or not policy.is_file():
        raise BootTestError(f"appliance-client policy init: {done.stderr.strip() or done.stdout.strip()}")
    return Policy.load(policy)


def with_byte_changed(disk: Path, offset: int, to: Path) -> Path:
    """A copy whose byte at `offset` has one bit flipped."""
    shutil.copyfile(disk, to)
    with to.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    return to


def cut_short(disk: Path, missing_bytes: int, to: Path) -> Path:
    shutil.copyfile(disk, to)
    with to.open("r+b") as file:
        file.truncate(disk.stat().st_size - missing_bytes)
    return to
