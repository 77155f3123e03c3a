"""The one error of the boot test."""

from __future__ import annotations


class BootTestError(Exception):
    """The image did not do what it has to. The message says what was expected and what the console showed."""


class EmulatorCrash(BootTestError):
    """The kernel crashed before anything of the image ran: QEMU's translator now and then executes code that the kernel
    is just patching. It says nothing about the image, neither good nor bad.
    """
