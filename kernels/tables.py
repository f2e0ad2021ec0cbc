"""Tile shapes, warps and pipeline stages for each GPU generation, and the reason of each.

Rows were chosen by compiling (`python -m vattn.kernels.aot --static`): no spills in any 16-bit or 8-bit
kernel, 16-byte loads, and the deepest pipeline that leaves room for the rest. `block_d` is the head size
rounded up to a power of two, `itemsize` the bytes of a stored key element.

A paged loop is given two stages more than a contiguous one: the pipeliner spends two on the chain
block number -> address -> tile, so at equal numbers the paged kernel would keep fewer tiles in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_STAGES = 2
"""Stages of a paged loop that go to reading block numbers."""

MAX_HEAD_ROWS = 64
"""Query heads of one KV head that share a decode tile; more are cut into several tiles."""


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
    """Tiles by (block_d, itemsize of K and V). `block_d` 32 also serves 16."""

    name: str
    decode: dict[tuple[int, int], Tile]
    prefill: dict[tuple[int, int], Tile]


_DECODE = {
    (32, 1): Tile(0, 64, 4, 4, why="8-bit tiles are small: one stage more keeps the same bytes in flight"),
    (32, 2): Tile(0, 64, 4, 4, why="4 KiB tiles: one stage more keeps enough bytes in flight"),
    (32, 4): Tile(0, 64, 4, 3, why="as 64-wide 16-bit heads: the same bytes per tile"),
    (64, 1): Tile(0, 64, 4, 4, why="8-bit tiles are small: one stage more keeps the same bytes in flight"),
    (64, 2): Tile(0, 64, 4, 3, why="8 KiB tiles, 36 KiB of shared memory: four programs per SM hide the reductions"),
    (64, 4): Tile(0, 32, 4, 3, why="half the tokens of 16-bit: the same bytes per tile"),
    (128, 1): Tile(0, 64, 4, 3, why="128 keys would spill: conversion to 16 bits holds the tile in registers"),
    (128, 2): Tile(0, 64, 4, 3, why="16 KiB tiles, 72 KiB of shared memory: two to three programs per SM"),
    (128, 4): Tile(0, 32, 4, 3, why="half the tokens of 16-bit: the same bytes per tile"),
    (256, 1): Tile(0, 32, 4, 3, why="as 128-wide heads with half the tokens"),
    (256, 2): Tile(0, 32, 4, 3, why="half the tokens of 128-wide heads: the same bytes per tile"),
    (256, 4): Tile(0, 16, 4, 3, why="half the tokens of 16-bit: the same bytes per tile"),
}
"""Decode is a stream of K and V: 32 KiB per step and program, whatever the head size, and a few programs
per SM. The same on every generation, because 16 query rows are too few for wgmma and tcgen05."""

SM80 = Architecture(
    "sm_80",
    decode=_DECODE,
    prefill={
        (32, 1): Tile(128, 64, 8, 3, why="as 64-wide heads"),
        (32, 2): Tile(128, 64, 8, 3, why="as 64-wide heads"),
        (32, 4): Tile(128, 32, 8, 2, why="half the keys of 16-bit"),
        (64, 1): Tile(128, 32, 8, 3, why="64 keys would spill in conversion"),
        (64, 2): Tile(128, 64, 8, 3, why="48 KiB of shared memory: two programs per SM, on sm_86 and sm_89 too"),
        (64, 4): Tile(128, 32, 8, 2, why="half the keys of 16-bit"),
        (128, 1): Tile(128, 32, 8, 3, why="as 16-bit"),
        (128, 2): Tile(128, 32, 8, 3, why="64 keys spill: accumulator and scores share 255 registers"),
        (128, 4): Tile(64, 32, 4, 2, why="half the rows of 16-bit"),
        (256, 1): Tile(32, 32, 4, 2, why="as 16-bit"),
        (256, 2): Tile(32, 32, 4, 2, why="more rows spill: warps are laid along the head, not along the rows"),
        (256, 4): Tile(32, 16, 4, 2, why="half the keys of 16-bit"),
    },
)
SM90 = Architecture(
    "sm_90",
    decode=_DECODE,
    prefill={
        (32, 1): Tile(128, 64, 8, 3, why="as 64-wide heads"),
        (32, 2): Tile(128, 128, 8, 3, tma=True, why="as 64-wide heads"),
        (32, 4): Tile(128, 64, 8, 2, why="half the keys of 16-bit"),
        (64, 1): Tile(128, 64, 8, 3, why="128 keys would spill in conversion"),
        (64, 2): Tile(128, 128, 8, 3, tma=True, why="wgmma m64n128; softmax costs per key, not per step"),
        (64, 4): Tile(128, 64, 8, 2, why="half the keys of 16-bit"),
        (128, 1): Tile(128, 64, 8, 3, why="as pointers in 16-bit"),
        (128, 2): Tile(128, 128, 8, 3, tma=True, why="wgmma m64n128, 224 KiB of shared memory; no address registers"),
        (128, 4): Tile(128, 32, 8, 2, why="half the keys of 16-bit"),
        (256, 1): Tile(128, 32, 8, 2, why="as 16-bit"),
        (256, 2): Tile(128, 32, 8, 3, tma=True, why="64 keys spill: the accumulator alone takes 128 registers"),
        (256, 4): Tile(64, 16, 8, 2, why="half the rows and keys of 16-bit"),
    },
)
SM100 = Architecture("sm_100", decode=SM90.decode, prefill=SM90.prefill)

POINTER_PREFILL = {(128, 2): Tile(128, 64, 8, 3, why="128 keys take 255 registers: a 64-bit address per row")}
"""What replaces a TMA tile where TMA can't be used: block tables, or strides no descriptor can express."""


def architecture(capability: int) -> Architecture:
    """The table for a compute capability (90 for 9.0). wgmma is sm_90's alone and tcgen05 that of sm_100 to
    sm_119; everything else, consumer Blackwell too, takes the sm_80 path, which fits into 99 KiB."""
    if 90 <= capability < 100:
        return SM90
    if 100 <= capability < 120:
        return SM100
    return SM80


def decode_tile(capability: int, block_d: int, itemsize: int) -> Tile:
    return architecture(capability).decode[max(block_d, 32), itemsize]


def prefill_tile(capability: int, block_d: int, itemsize: int, tma: bool) -> Tile:
    """`tma` False asks for a tile that goes by pointers."""
    key = max(block_d, 32), itemsize
    tile = architecture(capability).prefill[key]
    if tile.tma and not tma:
        tile = POINTER_PREFILL.get(key, Tile(tile.block_m, tile.block_n, tile.warps, tile.stages, why=tile.why))
    return tile
