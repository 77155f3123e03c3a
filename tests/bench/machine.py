"""The processor that a benchmark ran on, and what its cores can do at most."""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What kernels of either side choose by, in the order of /proc/cpuinfo's names.
_TELLING = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """`name` as the kernel has it, `features` those that kernels are chosen by, `cores` those of the machine."""

    name: str
    features: tuple[str, ...]
    cores: int

    def as_json(self) -> dict[str, object]:
        return {"processor": self.name, "features": list(self.features), "cores": self.cores}


def processor() -> Processor:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    facts = dict(reversed(pairs))
    name = facts.get("model name", platform.machine())
    if "model" in facts:
        name += f" (family {facts.get('cpu family')}, model {facts['model']}, stepping {facts.get('stepping')})"
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    features = tuple(feature for feature in _TELLING if feature in flags)
    return Processor(name=name, features=features, cores=sum(key == "processor" for key, _ in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What `threads` busy cores reach in loops of their own (peaks.c, compiled by the compiler of the peer).

    `read` is in bytes a second, over as many bytes as the weights have; `operations` are of 8-bit integers a second,
    by variant of the kernels, a multiply-add counting as two.
    """

    read: float
    operations: Mapping[str, float]

    @classmethod
    def measured(cls, compiler: str, *, threads: int, mib: int) -> Peaks:
        with tempfile.TemporaryDirectory(prefix="bench-peaks-") as folder:
            program = str(Path(folder, "peaks"))
            source = str(Path(__file__).with_name("peaks.c"))
            subprocess.run([compiler, "-O2", "-fopenmp", source, "-o", program], check=True)
            done = subprocess.run([program, str(threads), str(mib)], check=True, capture_output=True)
        figures: dict[str, float] = json.loads(done.stdout)
        return cls(read=figures.pop("read"), operations=figures)
