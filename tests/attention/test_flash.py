"""The flash-attn adapter, against a stand-in with flash-attn's signature and rules, written in plain PyTorch.

What is proven: the adapter's calls are ones that flash-attn accepts, and mean what it takes them to mean.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from vattn.attention.factory import create_attention
from vattn.attention.flash import ContiguousFlash
from vattn.config import KVCacheConfig
from vattn.errors import ConfigError
from vattn.kernels import reference
from vattn.kv.factory import create_kv_cache
from vattn.kv.inputs import ContiguousInputs
from vattn.kv.layout import KVLayout, KVShape
from vattn.vmm.host import HostDriver

HEADS, KV_HEADS, DIM, LAYERS, LAYER, SLOTS, LENGTH = 6, 2, 16, 3, 1, 7, 40


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """flash-attn 2.8's function as its docstring has it, for what the adapter may use of it.

    q `[batch, seqlen, heads, dim]`; k_cache, v_cache `[slots, max_len, kv_heads, dim]`, dense in the last
    dimension; cache_seqlens int32 `[batch]`: keys of each request; cache_batch_idx int32 `[batch]`: its slot.
    causal aligns at the bottom right: the last query sees all keys. Returns a dense tensor like q.
    """
    assert k is None and v is None and rotary_cos is None and rotary_sin is None and block_table is None
    assert cache_leftpad is None and not options, f"the stand-in does not know {options}"
    batch, seqlen, heads, dim = q.shape
    slots, max_len, kv_heads, cache_dim = k_cache.shape
    assert v_cache.shape == k_cache.shape and cache_dim == dim and heads % kv_heads == 0
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1, "the last dimension must be dense"
    assert isinstance(cache_seqlens, Tensor) and cache_batch_idx is not None
    for name, index in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx)):
        assert index.dtype == torch.int32, f"{name} must have dtype int32"
        assert index.shape == (batch,) and index.is_contiguous(), f"{name} must be a dense [batch]"
    assert (cache_seqlens <= max_len).all() and (cache_batch_idx < slots).all()
    assert causal or seqlen == 1
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(q.shape, dtype=q.dtype)
    for b, (slot, n) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        out[b] = reference.attend(q[b], k_cache[slot, :n], v_cache[slot, :n], scale).to(q.dtype)
    return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """flash_attn can be imported; the batch size of every call is noted."""
    calls: list[int] = []

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(q))
        return flash_attn_with_kvcache(q, *args, **kwargs)

    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_with_kvcache = counted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


# (tokens before, new tokens) of each request, and the batch sizes of the calls they should become
STEPS = {
    "decodes in one call": ([(4, 1), (0, 1), (31, 1)], [3]),
    "each prompt in its own": ([(0, 7), (0, 20)], [1, 1]),
    "chunks behind a context": ([(13, 6), (1, 2)], [1, 1]),
    "decodes, then chunks": ([(9, 1), (30, 1), (0, 12), (11, 3)], [2, 1, 1]),
    "a prompt's last token alone behind a chunk": ([(9, 1), (0, 12), (5, 1)], [1, 1, 1]),
}


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("name", STEPS)
def test_a_step_becomes_calls_that_flash_attn_takes(
    name: str, layout: KVLayout, installed: list[int]
) -> None:
    torch.manual_seed(0)
    chunks, calls = STEPS[name]
    shape = KVShape(LAYERS, KV_HEADS, DIM, torch.float32)
    config = KVCacheConfig(
        backend="static", layout=layout.value, memory_bytes=SLOTS * LENGTH * shape.token_bytes
    )
    cache = create_kv_cache(
        config, shape, HostDriver(), max_model_len=LENGTH, model_len=LENGTH, max_num_seqs=SLOTS
    )
    kv = cache.tensor.fill_(float("nan"))
    slots = torch.randperm(SLOTS)[: len(chunks)].tolist()
    lens = [before + new for before, new in chunks]
    cu = [sum(new for _, new in chunks[:b]) for b in range(len(chunks) + 1)]
    keys, values = ([torch.randn(n, KV_HEADS, DIM) for n in lens] for _ in range(2))
    for slot, (before, _), k, v in zip(slots, chunks, keys, values, strict=True):
        kv[LAYER, 0, slot, :before], kv[LAYER, 1, slot, :before] = k[:before], v[:before]
    mapping = [slot * LENGTH + t for slot, (b, n) in zip(slots, chunks, strict=True) for t in range(b, b + n)]
    inputs = ContiguousInputs(kv, cu, lens, torch.tensor(mapping), slots)
    # As transformers hands them over: heads before tokens in memory.
    q = torch.randn(HEADS, cu[-1], DIM).transpose(0, 1)
    k, v = (torch.cat([x[b:] for x, (b, _) in zip(xs, chunks, strict=True)]) for xs in (keys, values))

    got = ContiguousFlash().plan(inputs).attend(LAYER, q, k, v, 0.3)

    assert installed == calls
    assert got.shape == q.shape
    for b in range(len(chunks)):
        expected = reference.attend(q[cu[b] : cu[b + 1]], keys[b], values[b], 0.3)
        torch.testing.assert_close(got[cu[b] : cu[b + 1]].double(), expected, atol=1e-5, rtol=1e-5)


class Cache:
    """What `check` looks at."""

    reads = ContiguousInputs

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.shape = KVShape(1, 1, head_dim, dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "says"),
    [
        ("cpu", torch.bfloat16, 128, "needs a GPU, not cpu"),
        ("cuda", torch.float32, 128, "not torch.float32"),
        ("cuda", torch.int8, 128, "reads no quantised KV .*: use 'triton'"),
        ("cuda", torch.float16, 320, "not 320"),
    ],
)
def test_what_flash_attn_cannot_do_is_refused_by_name(
    device: str, dtype: torch.dtype, head_dim: int, says: str, installed: list[int]
) -> None:
    with pytest.raises(ConfigError, match=says):
        create_attention("flash_attn", Cache(head_dim, dtype), torch.device(device))  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        create_attention("flash_attn", Cache(128, torch.bfloat16), torch.device("cuda"))  # type: ignore[arg-type]


def test_a_gpu_and_16_bits_are_all_it_needs(installed: list[int]) -> None:
    cache = Cache(128, torch.bfloat16)
    chosen = create_attention("flash_attn", cache, torch.device("cuda"))  # type: ignore[arg-type]
    assert isinstance(chosen, ContiguousFlash)
