"""The machine code of the kernels, compiled for GPUs that are not there.

What holds for every Triton: no spills, 16-byte loads, the tensor core instructions of the generation. Figures
recorded for the installed Triton must not get worse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from vattn.kernels import aot, cases, offline, sass
from vattn.kernels.aot import Row

ROOT = Path(__file__).parents[2]
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def missing_tools() -> list[str]:
    missing = []
    for name in ("nvdisasm", "cuobjdump", "ptxas"):
        try:
            sass.tool(name)
        except sass.ToolMissing:
            missing.append(name)
    return missing


pytestmark = pytest.mark.skipif(
    bool(missing_tools()), reason=f"this Triton wheel comes without {', '.join(missing_tools())}"
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, where the interpreter of kernels is off."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


COMPARED = {
    "decode/contiguous/bf16/d128": (80, 90, 100),
    "decode/paged-16/bf16/d128": (80, 90, 100),
    "prefill/contiguous/bf16/d128": (80, 90, 100),
    "prefill/paged-16/bf16/d128": (80, 90, 100),
    "prefill/contiguous-pointers/bf16/d128": (90, 100),
    "decode/contiguous/bf16/d80": (80, 100),
    "prefill/contiguous/bf16/d128/group7": (90,),
    "prefill/paged-16/fp32/d256": (90, 100),  # the widest: it falls back on sm_90 alone
}
"""Kernels that are held against each other, and where. Compiling one takes a second or more of CPU."""


def plan() -> dict[int, list[str]]:
    """What to compile, by compute capability: the rest of the quick check takes turns among the three."""
    chosen: dict[int, list[str]] = {80: [], 90: [], 100: []}
    rest = [case.name for case in cases.all_cases() if case.representative and case.name not in COMPARED]
    for i, name in enumerate(rest):
        chosen[(80, 90, 100)[i % 3]].append(name)
    for name, capabilities in COMPARED.items():
        for cc in capabilities:
            chosen[cc].append(name)
    return chosen


COMPILE = """
import json, sys
from pathlib import Path
from vattn.kernels import aot
rows = []
for cc, names in json.loads(sys.argv[1]).items():
    rows += aot.report([int(cc)], lambda case: case.name in names)
aot.save_figures(rows, Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Every representative kernel, compiled for one GPU at least, by key."""
    path = tmp_path_factory.mktemp("static") / "figures.json"
    done = python("-c", COMPILE, json.dumps(plan()), str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = aot.load_figures(path)
    assert {(row.cc, row.case) for row in found.values()} == {
        (cc, name) for cc, names in plan().items() for name in names
    }
    return found


def find(rows: dict[str, Row], case: str, cc: int) -> Row:
    """The decode or prefill kernel of a case."""
    kind = case.partition("/")[0]
    return rows[f"{case}/{kind}_kernel/sm{cc}"]


def attention(rows: dict[str, Row]) -> Iterator[Row]:
    return (row for row in rows.values() if row.kernel in ("decode_kernel", "prefill_kernel"))


def test_float_kernels_do_not_spill(rows: dict[str, Row]) -> None:
    """Nor do 8-bit ones with the pinned Triton: see the recorded figures below."""
    types = ("bf16", "fp16", "fp32") if TRITON >= (3, 7) else ("bf16", "fp16")
    for row in attention(rows):
        if row.case.split("/")[2] in types:
            assert not row.spills and not row.stack, row.key


def unexplained_words(row: Row, rows: dict[str, Row]) -> int:
    """4-byte loads that are neither block numbers nor token scales: then they are elements of float32.

    How often a program reads a block number, a 16-bit kernel shows. Not with Triton 3.6, whose threads each
    read what they need: there block tables are left out.
    """
    words = row.loads.get("4", 0)
    kind, where, types, _ = row.case.split("/")[:4]
    if types.endswith("-token"):
        return 0
    if where.startswith("contiguous"):
        return words
    if types != "fp32" or TRITON < (3, 7):
        return 0
    like = find(rows, f"{kind}/{where}/bf16/d128", row.cc)
    return max(0, words - like.loads["4"])


def test_tiles_are_loaded_16_bytes_at_a_time(rows: dict[str, Row]) -> None:
    """Narrower are block numbers and token scales only, which are single words."""
    for row in attention(rows):
        assert not row.narrow_loads, row.key
        assert row.tma or row.loads["16"], row.key
        words = unexplained_words(row, rows)
        assert not words, f"{row.key} reads {words} single words"


def test_loads_run_ahead_of_the_arithmetic(rows: dict[str, Row]) -> None:
    for row in attention(rows):
        assert row.tma or row.cp_async, f"{row.key} waits for its loads"


@pytest.mark.parametrize(("cc", "kind"), [(80, "mma"), (90, "wgmma"), (100, "tcgen05")])
def test_prefill_uses_the_tensor_cores_of_its_generation(rows: dict[str, Row], cc: int, kind: str) -> None:
    prefills = [r for r in rows.values() if r.kernel == "prefill_kernel" and r.cc == cc]
    assert prefills
    for row in prefills:
        # The widest float32 heads leave no registers for the 64 rows that wgmma takes.
        falls_back = cc == 90 and "/fp32/d256" in row.case
        assert row.mma_kind == ("mma" if falls_back else kind), row.key


@pytest.mark.parametrize("cc", [90, 100])
def test_contiguous_prefill_goes_by_tma_and_needs_no_addresses(rows: dict[str, Row], cc: int) -> None:
    row = find(rows, "prefill/contiguous/bf16/d128", cc)
    pointers = find(rows, "prefill/contiguous-pointers/bf16/d128", cc)
    assert row.tma and not row.loads
    assert not pointers.tma
    assert row.per_key < 0.75 * pointers.per_key


@pytest.mark.parametrize("cc", [80, 90, 100])
def test_contiguous_never_costs_more_than_paged(rows: dict[str, Row], cc: int) -> None:
    for kind in ("decode", "prefill"):
        contiguous = find(rows, f"{kind}/contiguous/bf16/d128", cc)
        paged = find(rows, f"{kind}/paged-16/bf16/d128", cc)
        assert contiguous.per_key <= paged.per_key
        assert contiguous.integer_share <= paged.integer_share


def test_decode_bars(rows: dict[str, Row]) -> None:
    contiguous = find(rows, "decode/contiguous/bf16/d128", 90)
    assert contiguous.loop <= 270
    if TRITON >= (3, 7):  # 3.6 reads every block number 8 times
        paged = find(rows, "decode/paged-16/bf16/d128", 90)
        assert paged.loop <= 1.45 * contiguous.loop


def test_odd_head_sizes_and_groups_cost_what_their_tile_costs(rows: dict[str, Row]) -> None:
    for odd in ("decode/contiguous/bf16/d80", "prefill/contiguous/bf16/d128/group7"):
        for cc in COMPARED[odd]:
            usual = find(rows, f"{odd.partition('/')[0]}/contiguous/bf16/d128", cc)
            assert find(rows, odd, cc).loop <= usual.loop * 1.05


def test_nothing_got_worse_than_recorded(rows: dict[str, Row]) -> None:
    same_triton = aot.load_figures(aot.figures_file()) if aot.figures_file().exists() else {}
    assert not aot.regressions(rows.values(), same_triton)


def test_consumer_gpus_have_room_for_the_largest_tiles() -> None:
    """Too much shared memory is an error, as it would be at launch."""
    of_two = ("--cc", "89,120", "--only", "contiguous/fp32/d256")
    done = python("-m", "vattn.kernels.aot", "--static", *of_two)
    assert done.returncode == 0, done.stderr


def test_a_regression_fails_the_check(rows: dict[str, Row]) -> None:
    row = find(rows, "decode/contiguous/bf16/d128", 90)
    before = {row.key: row}
    assert aot.regressions([row, replace(row, loop=row.loop + 5)], before) == []
    worse = replace(row, loop=row.loop * 2, spills=1, loads={"2": 8}, mma_kind="none")
    found = "\n".join(aot.regressions([worse], before))
    for word in ("loop", "spills", "narrow_loads", "mma_kind"):
        assert f"{row.key}: {word} was" in found
    assert aot.regressions([replace(worse, case="something new")], before) == []


def test_figures_survive_a_round_trip(rows: dict[str, Row], tmp_path: Path) -> None:
    aot.save_figures(rows.values(), tmp_path / "f.json")
    assert aot.load_figures(tmp_path / "f.json") == rows
    assert json.loads((tmp_path / "f.json").read_text())["triton"] == triton.__version__


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="compute capability 42 is not one of 80"):
        offline.CompileOnlyDriver(42)


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0020*/              @!P0 LDG.E R3, [R6.64] ;
        /*0030*/                   IADD3 R4, R4, 0x10, RZ ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R8, R12, R16, R8 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   STL [R1], R3 ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
"""


def test_loops_are_found_and_counted() -> None:
    code = sass.Code(*sass.parse(LISTING), registers=0, stack=0)
    assert [i.opcode for i in code.main_loop()] == ["HMMA.16816.F32", "BRA"], "the innermost loop"
    assert len(code.loops()) == 1, "a branch to itself is no loop"
    assert code.count("LDL|STL") == 1
    assert sass.load_widths(code.instructions) == {16: 1, 4: 1}
    assert sass.integer_count(code.instructions) == 2
    assert sass.mma_kind(code.instructions) == "mma"
