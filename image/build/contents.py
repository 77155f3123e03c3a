"""What the image is made of, by name. The lock has the versions and the bytes."""

from __future__ import annotations

from typing import Final

from image.build.lock import Input, Lock

SUITE: Final = "trixie"

# What builds: a chroot of its own, so that the builder's machine does not matter. With all they depend on.
TOOLS: Final = (
    "?essential",
    "apt",
    "binutils",
    "busybox-static",
    "cmake",
    "cpio",
    "cryptsetup-bin",
    "dmsetup",
    "dosfstools",
    "erofs-utils",
    "fdisk",
    "g++",
    "gcc",
    "kmod",
    "libtss2-dev",
    "make",
    "mtools",
    "ninja-build",
    "patchelf",
    "pkgconf",
    "python3-pip",
    "python3.13-dev",
    "systemd",
    "systemd-boot-efi",
    "systemd-ukify",
    "zstd",
)

# What runs, package by package: dependencies would bring a shell and a package manager.
ROOT: Final = (
    "ca-certificates",
    "libbz2-1.0",
    "libc6",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "libgomp1",
    "liblzma5",
    "libpython3.13-minimal",
    "libpython3.13-stdlib",
    "libsqlite3-0",
    "libssl3t64",
    "libstdc++6",
    "libtss2-esys-3.0.2-0t64",
    "libtss2-mu-4.0.1-0t64",
    "libtss2-rc0t64",
    "libtss2-sys1t64",
    "libtss2-tcti-device0t64",
    "libtss2-tctildr0t64",
    "libuuid1",
    "libzstd1",
    "python3.13-minimal",
    "zlib1g",
)

KERNEL_OF: Final = "linux-image-cloud-amd64"  # depends on the newest signed kernel of the cloud flavour

# Their versions are those of constraints.txt, which the appliance is tested with.
WHEELS: Final = (
    "cbor2",
    "click",
    "cryptography",
    "diskcache",
    "fastapi",
    "h11",
    "httpcore",
    "httptools",
    "httpx",
    "jinja2",
    "numpy",
    "prometheus-client",
    "pydantic",
    "pyopenssl",
    "rich",
    "typing-extensions",
    "uvicorn",
)
# What packages name as needed and the appliance never imports: for clients, terminals and builds.
WHEELS_LEFT_OUT: Final = frozenset({"markdown-it-py", "mdurl", "pycparser", "pygments"})
# Compiled in the chroot, from source, with what their build needs.
SDISTS: Final = ("llama-cpp-python", "tpm2-pytss")
BUILD_WHEELS: Final = (
    "asn1crypto",
    "cffi",
    "packaging",
    "pkgconfig",
    "scikit-build-core",
    "setuptools",
    "setuptools-scm",
    "wheel",
)


def wheels(lock: Lock) -> tuple[Input, ...]:
    """The locked wheels that are in the image."""
    return tuple(one for one in lock.group("wheels") if one.name not in WHEELS_LEFT_OUT)
