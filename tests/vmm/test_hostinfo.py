"""How much memory a process may use, by the machine and by its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vattn.vmm.hostinfo import host_memory, max_map_count

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20


def group(
    folder: Path, limit: str, used: int, names: tuple[str, str] = ("memory.max", "memory.current")
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own"
    file.write_text("0::/outer/inner\n")
    return file


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    available, total = host_memory(tmp_path, tmp_path / "missing")
    assert total == MACHINE and 0 < available <= total


def test_a_limit_of_the_own_group_counts(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "outer" / "inner", str(64 * MIB), 24 * MIB)
    assert host_memory(tmp_path, own) == (40 * MIB, 64 * MIB)


def test_the_tightest_group_above_counts(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "outer" / "inner", "max", 10 * MIB)
    group(tmp_path / "outer", str(32 * MIB), 30 * MIB)
    group(tmp_path, str(64 * MIB), 60 * MIB)
    assert host_memory(tmp_path, own) == (2 * MIB, 32 * MIB)


def test_in_a_container_the_root_holds_the_limit(tmp_path: Path, own: Path) -> None:
    group(tmp_path, str(48 * MIB), 8 * MIB)
    assert host_memory(tmp_path, own) == (40 * MIB, 48 * MIB)


def test_an_overdrawn_group_has_nothing_available(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "outer" / "inner", str(8 * MIB), 9 * MIB)
    assert host_memory(tmp_path, own) == (0, 8 * MIB)


def test_unlimited_and_larger_than_the_machine_are_no_limit(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "outer" / "inner", "max", 0)
    group(tmp_path / "outer", str(MACHINE * 4), 0)
    assert host_memory(tmp_path, own)[1] == MACHINE


def test_version_one_groups_count_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu,cpuacct:/x\n5:memory,other:/job\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(tmp_path / "memory" / "job", str(16 * MIB), 4 * MIB, names)
    assert host_memory(tmp_path, own) == (12 * MIB, 16 * MIB)


def test_the_kernel_says_how_many_mappings_it_allows() -> None:
    limit = max_map_count()
    assert limit is None or limit > 1000
