"""Does a model fit: what its worker will need against what the machine and the control groups have left.

Sources: proc(5) for MemAvailable, the kernel's Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current,
memory.stat) and cgroup-v1/memory.rst. Page cache that can be dropped counts as free, as MemAvailable does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.errors import BootError, Unavailable

ReadText = Callable[[str], str | None]
"""The text of a file, None where there is none."""

_PROCESS_BYTES = 160 << 20  # interpreter, libraries, tokenizer
_ROW_BYTES = 64 << 10  # activations of one row of a batch, generously
_MASK_BYTES = 6  # of a cell: once in four bytes, once in two
_JOB_BYTES = 2 << 20  # sampler, grammar, prompt and answer as text, messages
_TOKEN_BYTES = 128  # a token in lists, and on its way
# Of native/llama_cpp's attention in each thread: scores (a row of all cells, if that is more), lists of cells, blocks.
_SCORES_BYTES = 1 << 20
_CELL_LISTS_BYTES = 20
_BLOCKS_BYTES = 1 << 20
_RETRY_S = 5
_V1_NO_LIMIT = 1 << 60
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes a worker comes to use beside the model's sealed file, which is there already when this is checked."""

    cells: int
    scratch: int
    prefixes: int

    @property
    def total(self) -> int:
        return self.cells + self.scratch + self.prefixes

    def beside(self, *, cells: int, scratch: int) -> Need:
        """This and what a second model takes in the same process."""
        return Need(cells=self.cells + cells, scratch=self.scratch + scratch, prefixes=self.prefixes)

    def describe(self) -> str:
        return (
            f"{_mib(self.cells)} for cells, {_mib(self.scratch)} of scratch and {_mib(self.prefixes)} for kept prefixes"
        )


def cell_bytes(metadata: Mapping[str, object], architecture: str) -> int:
    """Keys and values of one token, two bytes a number; where the metadata do not tell, the most it can be."""

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, list | tuple) and value:
            value = max((item for item in value if isinstance(item, int)), default=default)
        return value if isinstance(value, int) and value > 0 else default

    width = number("embedding_length", 8192)
    heads = number("attention.head_count", 1)
    kv_heads = number("attention.head_count_kv", heads)
    key = number("attention.key_length", -(-width // heads))
    value = number("attention.value_length", key)
    return 2 * number("block_count", 128) * kv_heads * (key + value)


def need(
    *, bytes_per_cell: int, kv_tokens: int, n_batch: int, vocabulary_size: int, cache_bytes: int, threads: int
) -> Need:
    scratch = scratch_bytes(n_batch=n_batch, vocabulary_size=vocabulary_size, kv_tokens=kv_tokens, threads=threads)
    return Need(cells=bytes_per_cell * kv_tokens, scratch=_PROCESS_BYTES + scratch, prefixes=cache_bytes)


class JobMemory:
    """Is there memory for one job more: asked with fresh numbers before a job is queued.

    Cells are there since the start. What grows with the jobs are copies of what the cells hold, while they are moved
    together and for the prefixes that are kept, rows of logits, and what a job itself is made of.
    """

    def __init__(
        self,
        *,
        bytes_per_cell: int,
        kv_tokens: int,
        row_bytes: int,
        available: Callable[[], int],
        rollback_bytes: int = 0,
    ) -> None:
        """`row_bytes` of logits are the most that one answer asks for in a step.

        `rollback_bytes` are the most that the copy takes that wrong guesses are taken back with: there is one for all.
        """
        self._bytes_per_cell = bytes_per_cell
        self._kv_tokens = kv_tokens
        self._row_bytes = row_bytes
        self._rollback_bytes = rollback_bytes
        self._available = available

    def check(self, *, cells: int, jobs: int, cache_room: int) -> None:
        """Raises Unavailable with the numbers. `cells` and `jobs` are all that were accepted, this one included.

        `cache_room` is how many bytes of kept prefixes may come to those there are.
        """
        held = self._bytes_per_cell * min(cells, self._kv_tokens)
        kept = min(cache_room, self._bytes_per_cell * cells)
        own = jobs * (_JOB_BYTES + self._row_bytes) + cells * _TOKEN_BYTES + self._rollback_bytes
        available = self._available()
        if held + kept + own > available:
            raise Unavailable(
                "insufficient_memory",
                f"not enough memory for one answer more: {jobs} may come to {_mib(held)} of copies, {_mib(kept)} of "
                f"kept prefixes and {_mib(own)} of their own, and {_mib(available)} are available",
                retry_after_s=_RETRY_S,
            )


def scratch_bytes(*, n_batch: int, vocabulary_size: int, kv_tokens: int, threads: int) -> int:
    """Activations and logits of an evaluation of `n_batch` rows, which cells each looks at, and attention's own."""
    rows = n_batch * (4 * vocabulary_size + _MASK_BYTES * kv_tokens + _ROW_BYTES)
    return rows + threads * attention_bytes(kv_tokens=kv_tokens)


def attention_bytes(*, kv_tokens: int) -> int:
    """What one thread's attention needs at most, over `kv_tokens` cells."""
    return max(_SCORES_BYTES, 4 * kv_tokens) + _CELL_LISTS_BYTES * kv_tokens + _BLOCKS_BYTES


def check_fits(wanted: int, what: str, available: int) -> None:
    """Raises BootError with the numbers."""
    if wanted > available:
        raise BootError(f"not enough memory: {what} makes {_mib(wanted)}, and {_mib(available)} are available")


def read_text(path: str) -> str | None:
    """`ReadText` of this machine."""
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return None


def available_bytes(read: ReadText) -> int:
    """The least of what the machine and every control group above this process have left."""
    left = [_machine(read)]
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            left += [_group_v2(folder, read) for folder in _folders("/sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            left += [_group_v1(folder, read) for folder in _folders("/sys/fs/cgroup/memory", path)]
    return max(0, min(left))


def _machine(read: ReadText) -> int:
    for line in (read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise BootError("cannot tell how much memory is available: /proc/meminfo has no MemAvailable")


def _folders(root: str, path: str) -> list[str]:
    """The group's folder and those of all groups above it; inside a container the path may not exist, the root does."""
    inner = PurePosixPath(path.lstrip("/"))
    return [str(PurePosixPath(root) / part) for part in (inner, *inner.parents)]


def _group_v2(folder: str, read: ReadText) -> int:
    limit, current = read(f"{folder}/memory.max"), read(f"{folder}/memory.current")
    if limit is None or current is None or limit.strip() == "max":
        return _V1_NO_LIMIT
    return int(limit) - int(current) + _stat(read(f"{folder}/memory.stat"), "inactive_file")


def _group_v1(folder: str, read: ReadText) -> int:
    limit, usage = read(f"{folder}/memory.limit_in_bytes"), read(f"{folder}/memory.usage_in_bytes")
    if limit is None or usage is None or int(limit) >= _V1_NO_LIMIT:
        return _V1_NO_LIMIT
    return int(limit) - int(usage) + _stat(read(f"{folder}/memory.stat"), "total_inactive_file")


def _stat(text: str | None, name: str) -> int:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _mib(count: int) -> str:
    return f"{-(-count // _MIB)} MiB"
