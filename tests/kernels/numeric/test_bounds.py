"""What kernels touch: nothing at or behind a request's end, however large the strides.

NaN behind every end is part of all numeric tests. Here K and V lie in a reservation of virtual memory of
which only the pages that hold tokens exist, and tokens end with their page:

    slot 0  |####|    |    |    |      # mapped, full of tokens to the last byte
    slot 1  |####|####|    |    |        not there: one byte read kills the process that tries
    slot 2  |    |    |    |    |        (a slot of nobody)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric.batches import Batch, Contiguous, Paged, assert_close, decode, make_batch, prefill
from vattn.kernels.split import SplitPlan
from vattn.kernels.store import store
from vattn.kernels.tables import Tile
from vattn.vmm.driver import Driver, open_driver
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

HEADS, HEAD_DIM = 2, 32
TOKEN = HEADS * HEAD_DIM * 4
"""Bytes of a token's keys in float32."""
REACHING = Tile(16, 64, 4, 2)
"""Tiles of more keys than a page holds: their masked part lies in the hole."""


@pytest.fixture
def driver(device: torch.device) -> Iterator[Driver]:
    driver = open_driver(device, granularity=4096) if device.type == "cpu" else open_driver(device)
    yield driver
    driver.close()


@pytest.fixture
def spaces(driver: Driver) -> Iterator[list[AddressSpace]]:
    opened: list[AddressSpace] = []
    yield opened
    for space in opened:
        space.close()


def open_space(driver: Driver, spaces: list[AddressSpace], rows: int, pages: int) -> AddressSpace:
    pool = PagePool(driver, driver.granularity, 256 * driver.granularity)
    spaces.append(AddressSpace(driver, pool, rows, pages * driver.granularity))
    return spaces[-1]


def fill(batch: Batch, k: Tensor, v: Tensor, places: list[int] | list[list[int]]) -> None:
    """Write the batch's keys and values by store; each place is a slot or a list of blocks."""
    size = k.shape[1]
    for place, keys, values in zip(places, batch.keys, batch.values, strict=True):
        where = [place * size + t if isinstance(place, int) else place[t // size] * size + t % size
                 for t in range(len(keys))]  # fmt: skip
        mapping = torch.tensor(where, dtype=torch.int64, device=k.device)
        store(keys.to(k.device), values.to(k.device), k, v, mapping)


@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
def test_slots_with_holes(
    layout: str, driver: Driver, spaces: list[AddressSpace], device: torch.device
) -> None:
    page = driver.granularity
    per_page = page // (2 * TOKEN if layout == "interleaved" else TOKEN)
    lengths = [per_page, 2 * per_page, 1]
    batch = make_batch(lengths, (3, 5, 1), head_dim=HEAD_DIM)
    slots = [2, 0, 3]
    halves = 1 if layout == "interleaved" else 2
    space = open_space(driver, spaces, 4 * halves, 4)
    for slot, pages in zip(slots, (1, 2, 1), strict=True):
        for half in range(halves):
            assert space.extend(half * 4 + slot, pages)
    pitch, token = space.pitch // 4, HEADS * HEAD_DIM
    strides = (token, pitch, 2 * token) if layout == "interleaved" else (4 * pitch, pitch, token)
    kv = space.tensor((2, 4, 4 * per_page, HEADS, HEAD_DIM), (*strides, HEAD_DIM, 1), torch.float32)
    fill(batch, kv[0], kv[1], slots)
    placed = Contiguous(batch, kv[0], kv[1], slots, device)
    assert_close(prefill(placed, tile=REACHING), batch.expected(), on=device)
    assert_close(prefill(placed, tile=Tile(16, 16, 4, 2)), batch.expected(), on=device)
    if device.type == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert_close(prefill(placed, tile=Tile(16, 16, 4, 2, tma=True)), batch.expected(), on=device)
    step = make_batch(lengths, head_dim=HEAD_DIM)
    placed.batch = step
    fill(step, kv[0], kv[1], slots)
    for plan in (None, SplitPlan(64, 2), SplitPlan(16, 3)):
        assert_close(decode(placed, plan, tile=REACHING), step.expected(), on=device)


def test_blocks_with_holes(driver: Driver, spaces: list[AddressSpace], device: torch.device) -> None:
    block_size = driver.granularity // (2 * TOKEN)
    lengths = [block_size, 2 * block_size, 1]
    tables = [[5], [2, 7], [0]]
    space = open_space(driver, spaces, 9, 1)
    for block in (5, 2, 7, 0):
        assert space.extend(block, 1)
    token = HEADS * HEAD_DIM
    strides = (token, space.pitch // 4, 2 * token, HEAD_DIM, 1)
    kv = space.tensor((2, 9, block_size, HEADS, HEAD_DIM), strides, torch.float32)
    batch = make_batch(lengths, (3, 5, 1), head_dim=HEAD_DIM)
    fill(batch, kv[0], kv[1], tables)
    placed = Paged(batch, kv[0], kv[1], tables, device)
    assert_close(prefill(placed, tile=REACHING), batch.expected(), on=device)
    step = make_batch(lengths, head_dim=HEAD_DIM)
    placed.batch = step
    fill(step, kv[0], kv[1], tables)
    for plan in (None, SplitPlan(64, 2)):
        assert_close(decode(placed, plan, tile=REACHING), step.expected(), on=device)


FAR = 1 << 30
"""Elements between neighbours: two steps leave 32-bit arithmetic."""


@pytest.mark.parametrize("far", ["slot", "token", "head"])
def test_neighbours_so_far_apart_that_32_bits_overflow(
    far: str, driver: Driver, spaces: list[AddressSpace], device: torch.device
) -> None:
    """One page for each slot, token or head, FAR elements apart; the other dimensions lie within it."""
    sizes = {"slot": 4, "token": 20, "head": 4}
    space = open_space(driver, spaces, sizes[far], 4 * FAR // driver.granularity)
    for row in range(sizes[far]):
        assert space.extend(row, 1)
    near = {name: n for name, n in sizes.items() if name != far} | ({} if far == "token" else {"token": 3})
    strides, step = {far: FAR}, 2 * 16
    for name in reversed(near):
        strides[name], step = step, step * near[name]
    assert 4 * step <= driver.granularity
    lengths = [near.get("token", sizes["token"])] * 4
    shape = (2, 4, lengths[0], 4, 16)
    kv = space.tensor(shape, (16, strides["slot"], strides["token"], strides["head"], 1), torch.float32)
    batch = make_batch(lengths, lengths, kv_heads=4, group=1, head_dim=16)
    slots = [3, 0, 2, 1]
    fill(batch, kv[0], kv[1], slots)
    placed = Contiguous(batch, kv[0], kv[1], slots, device)
    assert_close(prefill(placed), batch.expected(), on=device)
    placed.batch = step_batch = make_batch(lengths, kv_heads=4, group=1, head_dim=16)
    fill(step_batch, kv[0], kv[1], slots)
    assert_close(decode(placed), step_batch.expected(), on=device)


def test_blocks_so_far_apart_that_32_bits_overflow(
    driver: Driver, spaces: list[AddressSpace], device: torch.device
) -> None:
    space = open_space(driver, spaces, 4, 4 * FAR // driver.granularity)
    for block in range(4):
        assert space.extend(block, 1)
    kv = space.tensor((2, 4, 8, 2, 16), (32, FAR, 64, 16, 1), torch.float32)
    batch = make_batch((20,), (3,), head_dim=16)
    tables = [[3, 1, 2]]
    fill(batch, kv[0], kv[1], tables)
    placed = Paged(batch, kv[0], kv[1], tables, device)
    assert_close(prefill(placed), batch.expected(), on=device)
    placed.batch = step = make_batch((20,), head_dim=16)
    fill(step, kv[0], kv[1], tables)
    assert_close(decode(placed), step.expected(), on=device)
