"""What is left of memory, read from files of our own, and what a worker needs."""

from __future__ import annotations

import pytest

from appliance.engine.weights.memory import JobMemory, attention_bytes, available_bytes, cell_bytes, check_fits, need
from appliance.errors import BootError, Unavailable

MIB = 1 << 20
MEMINFO = "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:  4096000 kB\n"


def available(files: dict[str, str]) -> int:
    return available_bytes({"/proc/meminfo": MEMINFO, **files}.get)


def test_the_machine_without_control_groups() -> None:
    assert available({}) == 4_096_000 << 10


def test_v2_the_tightest_group_on_the_way_up_decides_and_droppable_cache_is_free() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "1000\n",
        "/sys/fs/cgroup/a/memory.max": f"{500 * MIB}\n",
        "/sys/fs/cgroup/a/memory.current": f"{450 * MIB}\n",
        "/sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {30 * MIB}\n",
    }
    assert available(files) == 80 * MIB
    files["/sys/fs/cgroup/a/memory.current"] = f"{900 * MIB}\n"
    assert available(files) == 0


def test_v2_in_a_container_that_sees_only_its_root() -> None:
    files = {
        "/proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
        "/sys/fs/cgroup/memory.max": f"{64 * MIB}\n",
        "/sys/fs/cgroup/memory.current": f"{MIB}\n",
    }
    assert available(files) == 63 * MIB


def test_v1_with_and_without_a_limit() -> None:
    files = {
        "/proc/self/cgroup": "7:cpu,cpuacct:/x\n4:memory:/x\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5\n",
    }
    assert available(files) == 4_096_000 << 10
    files["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = f"{20 * MIB}\n"
    files["/sys/fs/cgroup/memory/x/memory.usage_in_bytes"] = f"{15 * MIB}\n"
    files["/sys/fs/cgroup/memory/x/memory.stat"] = f"inactive_file 1\ntotal_inactive_file {MIB}\n"
    assert available(files) == 6 * MIB


def test_a_machine_that_does_not_tell_is_a_refusal() -> None:
    with pytest.raises(BootError, match="MemAvailable"):
        available_bytes({"/proc/meminfo": "MemFree: 1 kB\n"}.get)


def test_cells_by_the_metadata_and_by_their_worst_where_they_are_silent() -> None:
    smollm2 = {
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
    }
    assert cell_bytes(smollm2, "llama") == 23_040
    wide = {**smollm2, "llama.attention.key_length": 128, "llama.attention.value_length": 64}
    assert cell_bytes(wide, "llama") == 2 * 30 * 3 * 192
    assert cell_bytes({**smollm2, "llama.attention.head_count_kv": [0, 9, 3]}, "llama") == 3 * 23_040
    assert cell_bytes({}, "llama") == 2 * 128 * 2 * 8192


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    sizes = {"bytes_per_cell": 1024, "kv_tokens": 4096, "n_batch": 64, "vocabulary_size": 1000, "cache_bytes": 8 * MIB}
    wanted = need(**sizes, threads=1)
    assert wanted.cells == 4 * MIB
    assert need(**sizes, threads=4).scratch == wanted.scratch + 3 * attention_bytes(kv_tokens=4096)
    check_fits(wanted.total, wanted.describe(), wanted.total)
    with pytest.raises(BootError, match=r"4 MiB for cells.*8 MiB for kept prefixes.*available"):
        check_fits(wanted.total, wanted.describe(), wanted.total - 1)


def test_what_attention_keeps_grows_with_the_cells() -> None:
    assert 2 * MIB < attention_bytes(kv_tokens=4096) < 3 * MIB
    assert attention_bytes(kv_tokens=1 << 20) == (24 << 20) + MIB


def test_one_job_more_is_refused_with_the_numbers_where_what_all_may_come_to_does_not_fit() -> None:
    left = 100 * MIB
    memory = JobMemory(bytes_per_cell=1024, kv_tokens=20_000, row_bytes=MIB, available=lambda: left)
    memory.check(cells=10_000, jobs=2, cache_room=8 * MIB)
    left = 24 * MIB  # 10 of copies, 8 of kept prefixes, 8 of the jobs' own
    with pytest.raises(
        Unavailable, match=r"2 may come to 10 MiB of copies, 8 MiB .* 8 MiB of their own, and 24 MiB"
    ) as caught:
        memory.check(cells=10_000, jobs=2, cache_room=8 * MIB)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "insufficient_memory", 5)
    memory.check(cells=10_000, jobs=2, cache_room=0)


def test_copies_are_bounded_by_the_cells_and_kept_prefixes_by_the_cache() -> None:
    memory = JobMemory(bytes_per_cell=1024, kv_tokens=1024, row_bytes=0, available=lambda: 12 * MIB)
    # However many wait: the cells are 1 MiB, the cache takes 1 MiB more, 50,000 tokens in lists 6.2, a job 2.
    memory.check(cells=50_000, jobs=1, cache_room=MIB)
    with pytest.raises(Unavailable):
        memory.check(cells=50_000, jobs=1, cache_room=8 * MIB)
