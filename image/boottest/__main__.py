"""python -m image.boottest: boot, attest, ask, end; then every case of cases.py. Prints what it measured."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from client_sdk import Appliance, Policy, Rejection, SdkError, VerificationError
from image import service
from image.boottest import cases, material, swapped
from image.boottest.errors import BootTestError, EmulatorCrash
from image.boottest.machine import Machine, Shape, boot
from image.boottest.material import Material
from image.build import chroot, lock, uki
from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.measure.errors import MeasureError

T = TypeVar("T")

_PROJECT = Path(__file__).parents[2]
_ENVIRON = dict(os.environ)  # noqa: TID251 - composition root
_BOOT_LIMIT_S: Final = 600.0
_END_LIMIT_S: Final = 60.0
_REQUEST_LIMIT_S: Final = 300.0
_EXIT_TERMINATED: Final = 143
_TRIES: Final = 3
_MOMENT = re.compile(r"appliance: ((?:initrd|init|service|ready) after [0-9.]+ s[^\r\n]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: with a key that the operator handed out, under a policy made from the reference values."""

    policy: Policy
    api_key: str
    model: str

    def attest(self, machine: Machine) -> None:
        """Raises VerificationError where the policy refuses."""
        with self._appliance(machine) as appliance:
            appliance.attest()

    def ask(self, machine: Machine) -> str:
        """One short verified answer. Raises an SdkError."""
        with self._appliance(machine) as appliance:
            prompt = [{"role": "user", "content": "What is the capital of France?"}]
            return appliance.chat(prompt, model=self.model, temperature=0, max_tokens=8).text

    def _appliance(self, machine: Machine) -> Appliance:
        url = f"https://127.0.0.1:{machine.port}"
        return Appliance(url, policy=self.policy, api_key=self.api_key, timeout_s=_REQUEST_LIMIT_S)


def say(text: str) -> None:
    print(text, flush=True)


def honest(held: Material, shape: Shape, caller: Caller) -> None:
    """The image as it is. Raises BootTestError or SdkError."""
    with boot(shape, tpm_state=held.tpm_state, folder=held.work / "honest") as machine:
        for moment in ("initrd", "init", "service", "ready"):
            seconds = machine.wait_for(f"appliance: {moment} after", _BOOT_LIMIT_S)
            say(
                f"{moment} {seconds:.0f} s after switching on, {machine.cpu_s:.0f} processor seconds (emulated, no KVM)"
            )
        for line in _MOMENT.findall(machine.console):
            say(f"  by the kernel's clock: {line}")
        caller.attest(machine)
        say("attested: the quote's registers are the predicted ones, over this very connection")
        started = time.monotonic()
        answer = caller.ask(machine)
        say(f"verified answer in {time.monotonic() - started:.0f} s: {answer!r}")
        before = machine.console
        machine.press_power()
        machine.wait_for("appliance: stopped: the power button was pressed", machine_limit(machine, _END_LIMIT_S))
        machine.wait_end(_END_LIMIT_S)
        if answer.strip() and answer.strip() in machine.console:
            raise BootTestError("the answer is on the console")
        said = [line for line in before.splitlines() if "ready after" in line or "capital" in line]
        if len(said) != 1:
            raise BootTestError(f"the console tells of requests: {said}")
        say("powered off cleanly")


def machine_limit(machine: Machine, seconds: float) -> float:
    """A limit from now, in seconds since the machine's start."""
    return time.monotonic() - machine.started + seconds


def hostile(held: Material, case: cases.Case, caller: Caller) -> str:
    """Returns how the case was caught. Raises BootTestError where it was not."""
    with boot(case.shape, tpm_state=held.tpm_state, folder=held.work / "case") as machine:
        if case.expect == (cases.CLIENT,):
            machine.wait_for("appliance: ready after", _BOOT_LIMIT_S)
            try:
                caller.attest(machine)
            except VerificationError as error:
                if error.code is not Rejection.MEASUREMENT_NOT_ALLOWED:
                    raise BootTestError(f"refused, but for another reason: {error}") from error
                return f"the client refuses: {error.code.name}"
            raise BootTestError("the client accepted it")
        machine.wait_end(_BOOT_LIMIT_S)
        machine.check_started()
        started = "appliance: service after" in machine.console
        if "ready after" in machine.console or (started and not case.by_service):
            raise BootTestError(f"the service was started:\n{machine.tail()}")
        lines = [line for line in machine.console.splitlines() if any(text in line for text in case.expect)]
        if not lines:
            raise BootTestError(f"none of {case.expect} is on the console:\n{machine.tail()}")
        return f"console: {lines[0].strip()}"


def again(action: Callable[[], T], folder: Path) -> T:
    """Do it anew, in a new folder, where the emulator crashed before the image began; three times at most."""
    for _ in range(_TRIES - 1):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            return action()
        except EmulatorCrash as crash:
            say(f"({crash}: once more)")
    shutil.rmtree(folder, ignore_errors=True)
    return action()


def prepared(tools: Path) -> Chroot:
    """The chroot that the image was built in. Raises BuildError."""
    inputs = lock.load()
    return chroot.prepare(inputs.group("tools"), tools=tools, source_date_epoch=inputs.source_date_epoch)


def make_other_images(held: Material, shell: Chroot) -> None:
    """The image with one thing changed in its command line: a word that init knows, or a digit of a disk's hash."""
    text = (held.image / "cmdline-appliance-tpm2").read_text(encoding="ascii")
    for name in ("vmlinuz", "initrd.img"):
        shutil.copyfile(held.image / name, held.work / name)
    boot_files = uki.Boot(folder=held.work, kernel="vmlinuz", initrd="initrd.img", release="other")
    images = {"other": text.replace("loglevel=4", "loglevel=5")}
    for name, option in (("wrong-hash", "model_hash="), ("wrong-root", "root_hash=")):
        at = text.index(option) + len(option)
        images[name] = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    for name, changed in images.items():
        uki.make_disk(shell, uki.make(shell, boot_files, changed, name), held.work / f"boot-{name}.img")


def run(held: Material, tools: Path, chosen: Sequence[str]) -> int:
    """The number of cases that were not caught. Raises BootTestError where the honest image does not work."""
    shutil.rmtree(held.work, ignore_errors=True)
    held.work.mkdir(parents=True)
    shell = prepared(tools)
    if held.is_swapped:
        say(f"The image with the model {held.model} in place of its own, so that an emulator is quick enough")
        swapped.make(held.built, shell, held.image, store=held.store, model=held.model)
    random_bytes = os.urandom(38)  # noqa: TID251 - composition root
    api_key = material.write_settings(held.work, random_bytes, int(time.time()))  # noqa: TID251 - composition root
    pin = material.attestation_key(held)
    say("The firmware's own measurements, from a boot that does nothing else")
    log = again(lambda: material.firmware_log(held), held.work / "firmware-log")
    caller = Caller(policy=material.make_policy(held, log, pin), api_key=api_key, model=held.model)
    make_other_images(held, shell)
    shape = Shape(boot=held.image / "boot-tpm2.img", disks=held.disks)
    say("The image as it is")
    again(lambda: honest(held, shape, caller), held.work / "honest")
    missed = 0
    for name in chosen:
        case = cases.CASES[name](held, shape)
        started = time.monotonic()
        try:
            verdict = f"caught, {again(partial(hostile, held, case, caller), held.work / 'case')}"
        except (BootTestError, SdkError) as error:
            verdict, missed = f"NOT CAUGHT: {error}", missed + 1
        say(f"{case.name}: {verdict} ({time.monotonic() - started:.0f} s)")
    say(f"{len(chosen) + 1 - missed} passed, {missed} failed")
    return missed


def main(arguments: list[str]) -> int:
    """0 when everything was as it has to be, 1 when not, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.boottest", description="Boot the image under QEMU and OVMF.")
    parser.add_argument("--image", type=Path, default=_PROJECT / "build/image")
    parser.add_argument("--tools", type=Path, default=_PROJECT / "build/image-tools")
    parser.add_argument("--work", type=Path, default=_PROJECT / "build/image-test")
    parser.add_argument(
        "--store", type=Path, default=service.default_store(_ENVIRON), help="model store with the model that is tested"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--swap-model", action="store_true", help="MODEL is not the one that the image was built with")
    parser.add_argument("--case", action="append", choices=list(cases.CASES), help="only this one; default: all")
    parser.add_argument("--only-honest", action="store_true", help="boot the image as it is, and try no case")
    options = parser.parse_args(arguments)
    chosen = [] if options.only_honest else options.case or list(cases.CASES)
    work = options.work.resolve()
    held = Material(
        built=options.image.resolve(),
        image=work / "image" if options.swap_model else options.image.resolve(),
        work=work,
        store=options.store.resolve(),
        model=options.model,
        environ=_ENVIRON,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))  # so that no machine is left running
    try:
        return min(1, run(held, options.tools.resolve(), chosen))
    except (BootTestError, BuildError, MeasureError, SdkError) as error:
        print(f"image-test: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
