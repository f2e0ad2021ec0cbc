"""What the launch functions refuse, before anything runs, and the tables they choose tiles from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vattn.kernels import contiguous, paged, tables
from vattn.kernels.launch import KVScales, Operands, interpreted
from vattn.kernels.split import SplitBuffers, SplitPlan
from vattn.kernels.store import store

HEADS, POSITIONS = 4, 32


def operands(**changes: Any) -> dict[str, Any]:
    """A decode step of two requests that would be accepted, with changes."""
    kv = torch.zeros(2, 3, POSITIONS, 2, 64)
    return {
        "q": torch.zeros(2, HEADS, 64),
        "k": kv[0],
        "v": kv[1],
        "seq_lens": torch.ones(2, dtype=torch.int32),
    } | changes


def decode(**changes: Any) -> Tensor:
    arguments = {"slots": torch.zeros(2, dtype=torch.int32)} | operands(**changes)
    return contiguous.decode(**arguments)


def zeros8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 64)}, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.zeros(2, HEADS, 32)}, r"q must be \[tokens, q_heads, 64\]"),
        ({"q": torch.zeros(2, HEADS, 128)[..., ::2]}, "dense last dimension"),
        ({"q": torch.zeros(2, HEADS, 64).half()}, "q is torch.float16 but k and v are torch.float32"),
        ({"v": torch.zeros(3, POSITIONS, 2, 65)[..., :64]}, "equal shapes and strides"),
        ({"k": torch.zeros(3, 32, 2, 8), "v": torch.zeros(3, 32, 2, 8)}, "head_dim 8 is outside"),
        ({"k": torch.zeros(3, POSITIONS, 64, 2).mT, "v": torch.zeros(3, POSITIONS, 64, 2).mT}, "stride 2"),
        ({"k": zeros8(3, 32, 2, 64), "v": zeros8(3, 32, 2, 64)}, "torch.int8 keys and values need scales"),
        ({"scales": KVScales(torch.ones(2), torch.ones(2))}, "torch.float32 keys and values take no scales"),
        ({"scale": -1.0}, "softmax scale must be positive, not -1.0"),
        ({"out": torch.zeros(1, HEADS, 64)}, "out is"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots must be int32 \[2\], not torch.int64"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, r"seq_lens must be int32 \[2\], not torch.int32"),
        ({"splits": SplitBuffers(1, HEADS, 64, SplitPlan(256, 2), "cpu")}, "buffers are for 1 requests"),
    ],
)
def test_operands_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(**changes)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (KVScales(torch.ones(3), torch.ones(3)), r"scales have shape \(3,\); expected \(2,\)"),
        (KVScales(torch.ones(2), torch.ones(4)[::2]), "same shape and strides"),
        (KVScales(torch.ones(2).half(), torch.ones(2).half()), "float32"),
        (KVScales(torch.ones(4)[::2], torch.ones(4)[::2]), "contiguous"),
    ],
)
def test_scales_that_do_not_fit_are_named(scales: KVScales, message: str) -> None:
    cache = zeros8(3, POSITIONS, 2, 64)
    with pytest.raises(ValueError, match=message):
        decode(k=cache, v=cache, scales=scales)


def test_block_sizes_must_be_powers_of_two() -> None:
    kv = torch.zeros(2, 3, 24, 2, 64)
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="block size 24 is not a power of two"):
        paged.decode(**operands(k=kv[0], v=kv[1]), block_table=table)


def test_a_tma_tile_needs_strides_a_descriptor_has() -> None:
    kv = torch.zeros(2, 3, POSITIONS, 2, 67)[..., :64]
    tile = tables.Tile(16, 16, 4, 2, tma=True)
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="no tensor descriptor has strides"):
        contiguous.prefill(
            **operands(k=kv[0], v=kv[1]), cu_seqlens=cu_seqlens, max_query_len=1, tile=tile,
            slots=torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip


def tma(change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> bool:
    kv = change(torch.zeros(2, 3, POSITIONS, 2, 64, dtype=dtype))
    q = torch.zeros(2, HEADS, kv.shape[-1], dtype=dtype)
    return contiguous.can_use_tma(Operands.check(q, kv[0], kv[1], None, None, None))


def test_tma_is_used_where_a_descriptor_can_express_the_cache() -> None:
    assert tma(lambda kv: kv)
    assert tma(lambda kv: kv[..., :40]), "strides of 128 bytes"
    assert not tma(lambda kv: kv[..., :60].contiguous()), "strides of 120 bytes"
    assert not tma(lambda kv: kv[..., 1:33]), "the base is not aligned"
    assert not tma(lambda kv: kv[:, :1].expand(2, 3, *kv.shape[2:])), "a stride of zero"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(2, 2, 32)}, r"k must be floats \[2, 2, 64\]"),
        ({"k": torch.zeros(2, 2, 64).half(), "v": torch.zeros(2, 2, 64).half()}, "the cache is torch.float"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "dense int64 vector"),
    ],
)
def test_store_names_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    cache = torch.zeros(3, POSITIONS, 2, 64)
    new = torch.zeros(2, 2, 64)
    arguments = {"k": new, "v": new, "slot_mapping": torch.zeros(2, dtype=torch.int64)} | changes
    with pytest.raises(ValueError, match=message):
        store(k_cache=cache, v_cache=cache.clone(), **arguments)


@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("block_d", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_every_gpu_head_size_and_type_has_a_tile_and_a_reason(cc: int, block_d: int, itemsize: int) -> None:
    for tile in (
        tables.decode_tile(cc, block_d, itemsize),
        tables.prefill_tile(cc, block_d, itemsize, tma=True),
        tables.prefill_tile(cc, block_d, itemsize, tma=False),
    ):
        assert tile.why
        assert tile.warps in (4, 8) and tile.stages >= 2
    assert not tables.prefill_tile(cc, block_d, itemsize, tma=False).tma
    assert not (tile.tma and itemsize != 2)


def test_the_generation_decides_the_table() -> None:
    names = {cc: tables.architecture(cc).name for cc in (80, 86, 89, 90, 100, 103, 110, 120)}
    assert names == {80: "sm_80", 86: "sm_80", 89: "sm_80", 90: "sm_90", 100: "sm_100", 103: "sm_100",
                     110: "sm_100", 120: "sm_80"}  # fmt: skip


def test_a_group_of_query_heads_fills_a_tile_or_several() -> None:
    assert [tables.head_rows(g, 128) for g in (1, 16, 17, 32, 71)] == [16, 16, 32, 32, 32]
    assert [tables.head_rows(g, 256) for g in (1, 32)] == [16, 16]


@pytest.mark.skipif(torch.cuda.is_available() or interpreted(), reason="kernels can run here")
def test_without_a_gpu_the_error_says_how_to_interpret() -> None:
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Python starts"):
        decode()
