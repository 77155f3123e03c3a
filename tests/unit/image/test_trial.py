"""How a console is read: what must come, what must never come, and what an enclave's parts are booted with."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from image import trial
from image.build.errors import BuildError
from image.eif import trial as of_enclave
from image.measure import eif


def test_a_trial_ends_at_what_the_console_shows_and_fails_at_what_it_must_never_show(tmp_path: Path) -> None:
    """A program in QEMU's place: what is tested is how a console is read."""
    stand_in = tmp_path / "qemu-system-x86_64"
    stand_in.write_text(
        '#!/bin/sh\nfor a; do case $a in file:*) echo "Linux version 6" >"${a#file:}" ;; esac; done\nexec sleep 60\n',
        encoding="ascii",
    )
    stand_in.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    one = trial.Trial(what="a kernel", firmware=tmp_path / "X.fd", arguments=(), shows=b"Linux version")
    assert run_in(environ, one) < 30
    with pytest.raises(BuildError, match="a kernel: it was started"):
        run_in(environ, dataclasses.replace(one, shows=b"nothing", never=b"Linux"))
    with pytest.raises(BuildError, match="never showed"):
        run_in(environ, dataclasses.replace(one, shows=b"another line"))


def run_in(environ: dict[str, str], one: trial.Trial) -> float:
    return trial.run(one, environ=environ, limit_s=2.0)


def test_an_enclave_is_tried_with_what_its_file_holds(tmp_path: Path) -> None:
    image = eif.Eif(kernel=b"kernel", cmdline="reboot=k", ramdisks=(b"one.", b"two."), metadata=b"{}")
    one = of_enclave.make_trial(eif.read(eif.write(image)), tmp_path)
    assert one.arguments == ("-kernel", tmp_path / "kernel", "-initrd", tmp_path / "initrd", "-append", "reboot=k")
    assert (tmp_path / "initrd").read_bytes() == b"one.two."
    assert (tmp_path / "kernel").read_bytes() == b"kernel"
