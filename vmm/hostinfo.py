"""How much memory this process may use: all of the machine's, or less if a control group limits it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> tuple[int, int]:
    """(available, total) bytes: the smallest of the machine's and those of the process's control groups.

    `cgroups`: where control groups are mounted. `own_cgroups`: the file that names those of this process.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo_available() or page * os.sysconf("SC_AVPHYS_PAGES")
    for folder, limit_name, used_name in _control_groups(cgroups, own_cgroups):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and limit < total:
            total = limit
            available = min(available, limit - (used or 0))
    return max(available, 0), total


def max_map_count() -> int | None:
    """Maximum number of mappings of one process (`vm.max_map_count`); None if the system does not say."""
    return _number(Path("/proc/sys/vm/max_map_count"))


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _control_groups(mounted: Path, own: Path) -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of the process's memory groups and their parents (cgroup v2, v1)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = mounted, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may name the group as the host sees it; the root then holds the limit.
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            if level.is_relative_to(root):
                found.append((level, *names))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
