"""Tile shapes, warps and pipeline stages for each GPU generation, and the reason of each.

Rows were chosen by compiling (`python -m vattn.kernels.aot --static`): no spills, 16-byte loads, and the
deepest pipeline that leaves room for the rest. `block_d` is the head size rounded up to a power of two,
`itemsize` the bytes of a stored element of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TABLE_STAGES = 2
"""Stages a paged loop has beyond a contiguous one. The pipeliner spends two on the chain block number ->
address -> tile; at equal numbers a paged kernel would keep fewer tiles in flight."""


@dataclass(frozen=True)
class Tile:
    """Launch shape of one kernel. block_m: query rows (prefill only); block_n: keys per step."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    why: str = ""


@dataclass(frozen=True)
class Architecture:
    """Tiles by (block_d, itemsize). `block_d` 32 also serves 16.

    `pointers` replaces TMA tiles where TMA can't be used: block tables, strides no descriptor can express.
    """

    name: str
    decode: dict[tuple[int, int], Tile]
    prefill: dict[tuple[int, int], Tile]
    pointers: dict[tuple[int, int], Tile]


_DECODE = {
    (32, 1): Tile(0, 64, 4, 4, why="2 KiB tiles: one stage more keeps bytes in flight"),
    (32, 2): Tile(0, 64, 4, 4, why="4 KiB tiles: one stage more keeps bytes in flight"),
    (32, 4): Tile(0, 64, 4, 3, why="the bytes of 64-wide 16-bit heads"),
    (64, 1): Tile(0, 64, 4, 4, why="4 KiB tiles: one stage more keeps bytes in flight"),
    (64, 2): Tile(0, 64, 4, 3, why="36 KiB of shared memory: programs hide each other's reductions"),
    (64, 4): Tile(0, 32, 4, 3, why="half the keys of 16-bit: the same bytes per tile"),
    (128, 1): Tile(0, 64, 4, 3, why="128 keys spill: widening to 16 bits holds the tile in registers"),
    (128, 2): Tile(0, 64, 4, 3, why="16 KiB tiles, 70 KiB of shared memory: two to three programs per SM"),
    (128, 4): Tile(0, 32, 4, 3, why="half the keys of 16-bit: the same bytes per tile"),
    (256, 1): Tile(0, 32, 4, 3, why="half the keys of 128-wide heads: the same bytes per tile"),
    (256, 2): Tile(0, 32, 4, 3, why="half the keys of 128-wide heads: the same bytes per tile"),
    (256, 4): Tile(0, 16, 4, 3, why="half the keys of 16-bit: the same bytes per tile"),
}
"""Decode is a stream of K and V with little arithmetic: 32 KiB a step and a few programs per SM. One table
for all: 16 query rows are too few for wgmma and tcgen05, so every generation uses the same instructions."""

_SM80_PREFILL = {
    (32, 1): Tile(128, 64, 4, 3, why="8 warps would load 8 bytes a thread"),
    (32, 2): Tile(128, 64, 8, 3, why="as 64-wide heads"),
    (32, 4): Tile(128, 32, 8, 2, why="half the keys of 16-bit"),
    (64, 1): Tile(128, 32, 4, 3, why="8 warps would load 8 bytes a thread; 64 keys spill with block tables"),
    (64, 2): Tile(128, 64, 8, 3, why="48 KiB of shared memory: fits the 99 KiB of sm_86 and sm_89 twice"),
    (64, 4): Tile(128, 32, 8, 2, why="half the keys of 16-bit"),
    (128, 1): Tile(128, 32, 8, 3, why="as 16-bit"),
    (128, 2): Tile(128, 32, 8, 3, why="64 keys spill: accumulator and scores share 255 registers"),
    (128, 4): Tile(32, 32, 4, 2, why="64 rows spill: accumulator, scores and Q are all 4 bytes"),
    (256, 1): Tile(32, 32, 8, 2, why="as 16-bit"),
    (256, 2): Tile(32, 32, 8, 2, why="more rows spill: warps lie along the head, each holds all of Q"),
    (256, 4): Tile(32, 16, 4, 2, why="as 16-bit, half the keys"),
}

_SM90_PREFILL = {
    (32, 1): Tile(128, 128, 8, 3, why="64 keys would load 8 bytes a thread"),
    (32, 2): Tile(128, 128, 8, 3, tma=True, why="as 64-wide heads"),
    (32, 4): Tile(128, 64, 8, 2, why="half the keys of 16-bit"),
    (64, 1): Tile(128, 64, 8, 3, why="128 keys spill: widening holds the tile in registers"),
    (64, 2): Tile(128, 128, 8, 3, tma=True, why="the widest wgmma whose scores leave room: 181 registers"),
    (64, 4): Tile(128, 64, 8, 2, why="half the keys of 16-bit"),
    (128, 1): Tile(128, 64, 8, 3, why="as 16-bit by pointers"),
    (128, 2): Tile(128, 128, 8, 3, tma=True, why="TMA needs no address registers; 224 KiB of shared memory"),
    (128, 4): Tile(128, 32, 8, 2, why="64 keys spill"),
    (256, 1): Tile(128, 16, 8, 2, why="32 keys spill with scales per token"),
    (256, 2): Tile(128, 32, 8, 3, tma=True, why="64 keys spill: the accumulator alone takes 128 registers"),
    (256, 4): Tile(32, 16, 4, 2, why="mma.sync, as sm_80: 64 rows, what wgmma takes, spill"),
}

_SM90_POINTERS = {
    (32, 2): Tile(128, 128, 8, 3, why="as by TMA"),
    (64, 2): Tile(128, 128, 8, 3, why="as by TMA"),
    (128, 2): Tile(128, 64, 8, 3, why="128 keys take 255 registers: a 64-bit address per row"),
    (256, 2): Tile(128, 32, 8, 3, why="as by TMA"),
}

_SM100_PREFILL = _SM90_PREFILL | {
    (256, 4): Tile(64, 16, 8, 2, why="half the rows and keys of 16-bit"),
}
"""tcgen05 keeps the accumulator in tensor memory, yet Triton's loop passes it through registers to rescale
it: the limits, and so the tiles, are those of sm_90, but for the widest."""

SM80 = Architecture("sm_80", _DECODE, _SM80_PREFILL, {})
SM90 = Architecture("sm_90", _DECODE, _SM90_PREFILL, _SM90_POINTERS)
SM100 = Architecture("sm_100", _DECODE, _SM100_PREFILL, _SM90_POINTERS)


def architecture(capability: int) -> Architecture:
    """The table for a compute capability (90 for 9.0). wgmma is sm_90's alone and tcgen05 that of sm_100 to
    sm_119; everything else, consumer Blackwell too, takes the sm_80 path, which fits into 99 KiB."""
    if 90 <= capability < 100:
        return SM90
    if 100 <= capability < 120:
        return SM100
    return SM80


def head_rows(group: int, block_d: int) -> int:
    """Rows of a decode tile for `group` query heads per KV head: a power of two, at least 16, which is what a
    tensor core takes. More than 32 (16 if heads are wide) would spill: such groups take several tiles."""
    rows = 16
    while rows < group and rows < (32 if block_d <= 128 else 16):
        rows *= 2
    return rows


def decode_tile(capability: int, block_d: int, itemsize: int) -> Tile:
    return architecture(capability).decode[max(block_d, 32), itemsize]


def prefill_tile(capability: int, block_d: int, itemsize: int, tma: bool) -> Tile:
    """`tma` False asks for a tile that goes by pointers."""
    table, key = architecture(capability), (max(block_d, 32), itemsize)
    return table.prefill[key] if tma or key not in table.pointers else table.pointers[key]


def paged(tile: Tile) -> Tile:
    """The tile with the stages a block table takes."""
    return replace(tile, stages=tile.stages + TABLE_STAGES)
