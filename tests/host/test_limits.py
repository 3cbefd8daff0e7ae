"""The host's limits, read from made-up systems, and the refusal before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from muonloom.host import Limit, check_host_bytes, read_limits

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def found(root: Path) -> dict[str, int]:
    """The limits, by source below `root`."""
    limits = read_limits(root=root)
    by_source = {limit.source.replace(f"{root}/", ""): limit.free_bytes for limit in limits}
    assert len(by_source) == len(limits)
    return by_source


def test_a_system_without_these_files_has_no_known_limit(tmp_path: Path) -> None:
    assert read_limits(root=tmp_path) == ()
    check_host_bytes(1 << 60, what="masters and momentum", limits=())


def test_this_system_can_be_read() -> None:
    limits = read_limits()
    assert all(0 <= limit.free_bytes < 1 << 62 for limit in limits)
    if Path("/proc/meminfo").exists():
        assert limits[0].source == "MemAvailable in /proc/meminfo"
        assert limits[0].free_bytes > 1 << 20


def test_available_memory_of_the_machine(tmp_path: Path) -> None:
    meminfo = "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     300 kB\nHugePages_Total:  0"
    write(tmp_path, {"proc/meminfo": meminfo})
    assert found(tmp_path) == {"MemAvailable in proc/meminfo": 300 * 1024}


def test_version_2_counts_used_memory_less_droppable_cache(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": 1000,
            "sys/fs/cgroup/job/memory.current": 700,
            "sys/fs/cgroup/job/memory.stat": "anon 400\ninactive_file 250\nactive_file 50",
        },
    )
    assert found(tmp_path) == {"sys/fs/cgroup/job/memory.max": 1000 - 700 + 250}


def test_every_group_above_counts_as_well(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/node/pod/task",
            f"{base}/memory.max": 4000,
            f"{base}/memory.current": 1000,
            f"{base}/node/memory.max": 500,
            f"{base}/node/memory.current": 100,
            f"{base}/node/pod/memory.max": "max",
            f"{base}/node/pod/memory.current": 100,
            f"{base}/node/pod/task/memory.max": 900,
            f"{base}/node/pod/task/memory.current": 50,
            f"{base}/node/other/memory.max": 1,
        },
    )
    assert found(tmp_path) == {
        f"{base}/node/pod/task/memory.max": 850,
        f"{base}/node/memory.max": 400,
        f"{base}/memory.max": 3000,
    }


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": 1000, "sys/fs/cgroup/memory.current": 1}
    for group in ("/", "/seen/only/by/the/host", "/../sibling"):
        write(tmp_path, {"proc/self/cgroup": f"0::{group}", **files})
        assert found(tmp_path) == {"sys/fs/cgroup/memory.max": 999}


def test_a_group_outside_of_the_container_is_not_followed_out_of_the_mount(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../outside",
            "sys/outside/memory.max": 5,
            "sys/fs/cgroup/memory.max": 9,
        },
    )
    assert found(tmp_path) == {"sys/fs/cgroup/memory.max": 9}


def test_the_name_of_a_group_need_not_be_text(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "", "sys/fs/cgroup/memory.max": 9})
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/job\xff\n")
    try:
        write(tmp_path, {"sys/fs/cgroup/job\udcff/memory.max": 5})
    except OSError:
        pytest.skip("this file system takes only names that are text")
    assert set(found(tmp_path).values()) == {5, 9}


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b:c\n0::/",
            f"{base}/memory.limit_in_bytes": UNLIMITED_V1,
            f"{base}/a/memory.limit_in_bytes": 3000,
            f"{base}/a/memory.usage_in_bytes": 2000,
            f"{base}/a/memory.stat": "inactive_file 7\ntotal_inactive_file 500",
            f"{base}/a/b:c/memory.limit_in_bytes": 8000,
            f"{base}/a/b:c/memory.usage_in_bytes": 2000,
        },
    )
    assert found(tmp_path) == {
        f"{base}/a/b:c/memory.limit_in_bytes": 6000,
        f"{base}/a/memory.limit_in_bytes": 1500,
    }


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100,
            "sys/fs/cgroup/memory.current": 150,
        },
    )
    assert found(tmp_path) == {"sys/fs/cgroup/memory.max": 0}


def test_cache_beyond_what_is_used_does_not_raise_the_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100,
            "sys/fs/cgroup/memory.current": 10,
            "sys/fs/cgroup/memory.stat": "inactive_file 30",
        },
    )
    assert found(tmp_path) == {"sys/fs/cgroup/memory.max": 100}


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 2", "1.5", "9" * 5000, "²", "\x00"])
def test_malformed_limits_are_ignored(tmp_path: Path, text: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": text,
        },
    )
    assert found(tmp_path) == {}


@pytest.mark.parametrize(
    "line", ["", "MemAvailable:", "MemAvailable: some kB", "MemAvailable 5 kB"]
)
def test_malformed_available_memory_is_ignored(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 9 kB\n{line}"})
    assert found(tmp_path) == {}


@pytest.mark.parametrize(
    "line",
    ["", ":", "0:", "0", "memory", "0::", "0:://", "0::\x00", "0::/a\x00b", "::/", "0::a/../b"],
)
def test_malformed_memberships_are_ignored(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"proc/self/cgroup": f"{line}\n1:memory:/job"})
    write(tmp_path, {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": 77})
    assert found(tmp_path) == {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": 77}


def test_malformed_use_counts_as_none(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100,
            "sys/fs/cgroup/memory.current": "?",
            "sys/fs/cgroup/memory.stat": "inactive_file\ninactive_file many",
        },
    )
    assert found(tmp_path) == {"sys/fs/cgroup/memory.max": 100}


def test_bytes_that_are_no_text_and_folders_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.current": 1})
    (tmp_path / "proc/meminfo").write_bytes(b"\xff\xfe\x00MemAvailable: 1 kB")
    (tmp_path / "sys/fs/cgroup/memory.max").mkdir()
    assert found(tmp_path) == {}


def test_state_that_fits_is_taken_and_state_that_does_not_is_refused(tmp_path: Path) -> None:
    nbytes = GIB + GIB // 8
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB",
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": int(1.2 * GIB),
            "sys/fs/cgroup/job/memory.current": 0,
        },
    )
    check_host_bytes(nbytes, what="masters and momentum", limits=read_limits(root=tmp_path))

    write(tmp_path, {"sys/fs/cgroup/job/memory.max": GIB})
    with pytest.raises(MemoryError) as caught:
        check_host_bytes(nbytes, what="masters and momentum", limits=read_limits(root=tmp_path))

    message = str(caught.value)
    assert message.startswith(
        f"placement: got {nbytes} bytes of masters and momentum for the host; "
        f"wanted at most {GIB} bytes, by {tmp_path}/sys/fs/cgroup/job/memory.max. "
    )
    for remedy in (
        "more memory",
        'master_layout="split"',
        "momentum_dtype=torch.bfloat16",
        "more ranks",
    ):
        assert remedy in message


def test_the_tightest_limit_decides_to_the_byte() -> None:
    limits = [Limit(source=name, free_bytes=n) for name, n in (("a", 10), ("b", 5), ("c", 7))]

    check_host_bytes(5, what="state", limits=limits)
    with pytest.raises(MemoryError, match="at most 5 bytes, by b"):
        check_host_bytes(6, what="state", limits=limits)
