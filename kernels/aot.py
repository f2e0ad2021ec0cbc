"""The static performance check: every kernel compiled with no GPU, its machine code measured and compared.

    python -m vattn.kernels.aot --static                      table for sm_80, sm_90 and sm_100
    python -m vattn.kernels.aot --static --cc 90 --only decode --json out.json
    python -m vattn.kernels.aot --static --check              fail if worse than recorded for this Triton

Instruction counts are not times. They show how many instructions a kernel issues per key, whether registers
suffice and how wide loads are. That is enough to notice when a kernel gets worse, and to see what a block
table costs. Recorded figures are in `figures/`, one file per Triton version.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from .cases import Case, all_cases
from .offline import Compiled, compile_only
from .sass import Code, count, disassemble, integer_count, load_widths, mma_kind

FIGURES = Path(__file__).parent / "figures"
CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True)
class Row:
    """Measurements of one kernel for one compute capability; loop figures are of its main loop, per warp."""

    case: str
    kernel: str
    cc: int
    warps: int
    registers: int
    spills: int
    """Local memory instructions in the whole kernel."""
    stack: int
    """Bytes of local memory per thread."""
    shared: int
    """Bytes of shared memory."""
    keys: int
    """Keys a program attends to in one round of its main loop; 0 if it has none."""
    loop: int
    """Instructions in the main loop."""
    integer: int
    """Of these, integer: addresses, control, predicates, moves."""
    mma: int
    mma_kind: str
    cp_async: int
    tma: int
    loads: dict[str, int]
    """Global loads by bytes per thread: a tile's should be 16, block numbers and scales are 4."""

    @property
    def key(self) -> str:
        return f"{self.case}/{self.kernel}/sm{self.cc}"

    @property
    def per_key(self) -> float:
        """Instructions a program issues per key it attends to, all its warps together."""
        return self.loop * self.warps / self.keys if self.keys else 0.0

    @property
    def integer_share(self) -> float:
        return self.integer / self.loop if self.loop else 0.0

    @property
    def narrow_loads(self) -> int:
        """Loads under 16 bytes that are not single 4-byte words."""
        return sum(n for width, n in self.loads.items() if width not in ("16", "4"))


def measure(case: str, capability: int, compiled: Compiled, code: Code) -> Row:
    loop = code.main_loop()
    return Row(
        case=case,
        kernel=compiled.name,
        cc=capability,
        warps=compiled.warps,
        registers=code.registers,
        spills=code.count(r"LDL|STL"),
        stack=code.stack,
        shared=compiled.shared,
        keys=compiled.constants["BLOCK_N"] if loop else 0,
        loop=len(loop),
        integer=integer_count(loop),
        mma=sum(count(loop, pattern) for pattern in (r"[HIQ]G?MMA", r"UTC\w*MMA")),
        mma_kind=mma_kind(loop),
        cp_async=count(loop, "LDGSTS"),
        tma=count(loop, "UTMALDG"),
        loads={str(width): n for width, n in sorted(load_widths(loop).items())},
    )


def report(
    capabilities: Sequence[int] = CAPABILITIES,
    select: Callable[[Case], bool] = lambda case: True,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compile and measure the selected cases; `progress` sees each row as it is ready.

    Raises RuntimeError if TRITON_INTERPRET is set, sass.ToolMissing without Triton's tools, ValueError for an
    unknown compute capability, and whatever Triton raises for a kernel that doesn't compile or doesn't fit.
    """
    rows: list[Row] = []
    codes: dict[bytes, Code] = {}  # several cases share a kernel
    for capability in capabilities:
        for case in filter(select, all_cases()):
            with compile_only(capability) as driver:
                case.launch(capability)
            for compiled in driver.launches:
                code = codes.get(compiled.cubin) or disassemble(compiled.cubin)
                codes[compiled.cubin] = code
                rows.append(measure(case.name, capability, compiled, code))
                progress(rows[-1])
    return rows


def figures_file(version: str = triton.__version__) -> Path:
    return FIGURES / f"triton-{version}.json"


def load_figures(path: Path) -> dict[str, Row]:
    """Rows of a JSON file by key."""
    return {row.key: row for row in (Row(**entry) for entry in json.loads(path.read_text())["kernels"])}


def save_figures(rows: Iterable[Row], path: Path) -> None:
    """Write a JSON file with one kernel per line, so that diffs are easy to read."""
    kernels = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": [\n{kernels}\n]}}\n')


def regressions(rows: Iterable[Row], recorded: dict[str, Row]) -> list[str]:
    """What got worse since the figures were recorded. Small changes of scheduling are allowed."""
    found = []
    for row in rows:
        old = recorded.get(row.key)
        if old is None:
            continue
        limits = {
            "registers": old.registers * 1.1,
            "spills": old.spills,
            "stack": old.stack,
            "shared": old.shared * 1.05,
            "loop": old.loop * 1.05,
            "integer": old.integer * 1.1 + 2,
            "narrow_loads": old.narrow_loads,
        }
        for name, limit in limits.items():
            if getattr(row, name) > limit:
                found.append(f"{row.key}: {name} was {getattr(old, name)}, is {getattr(row, name)}")
        for name in ("mma_kind", "tma"):
            if getattr(row, name) != getattr(old, name):
                found.append(f"{row.key}: {name} was {getattr(old, name)}, is {getattr(row, name)}")
    return found


HEADER = f"{'kernel':58} regs spills  shared  loop per key  int% mma          cp.async tma loads"


def line(row: Row) -> str:
    """One row of the printed table."""
    loads = " ".join(f"{n}x{width}B" for width, n in row.loads.items())
    return (
        f"{row.key:58} {row.registers:4} {row.spills:6} {row.shared // 1024:3} KiB {row.loop:5} "
        f"{row.per_key:7.1f} {row.integer_share:5.0%} {f'{row.mma} {row.mma_kind}':12} {row.cp_async:8} "
        f"{row.tma:3} {loads}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels without a GPU and measure them.")
    parser.add_argument("--static", action="store_true", required=True, help="measure machine code")
    parser.add_argument("--cc", default="80,90,100", help="compute capabilities, e.g. 80,90,100")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="representative cases only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--check", action="store_true", help="compare with the recorded figures")
    options = parser.parse_args(arguments)
    print(f"Triton {triton.__version__}; static figures: nothing runs on a GPU\n{HEADER}")
    rows = report(
        [int(cc) for cc in options.cc.split(",")],
        lambda case: options.only in case.name and (case.representative or not options.quick),
        lambda row: print(line(row), flush=True),
    )
    if options.json:
        save_figures(rows, options.json)
    if not options.check:
        return 0
    if not figures_file().exists():
        print(f"no figures are recorded for this Triton: write {figures_file()} with --json")
        return 1
    problems = regressions(rows, load_figures(figures_file()))
    print("\n".join(problems) or f"{len(rows)} kernels, none worse than recorded")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
