"""Kernels that know nothing of virtual memory, called directly on it, with nothing of ours in between.

A request's keys and values are an ordinary strided view of its row. Its last token ends with a page:

    row   | page | page | page |  . . unmapped: touching it kills the process . .
          t0 ................ tn

so a kernel that reads one byte too far dies here. Each runs in a process of its own, and must give what it
gives on ordinary memory with the same strides.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from vattn.config import KVCacheConfig
from vattn.kv.cache import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.inputs import Chunk
from vattn.kv.layout import KVLayout, KVShape
from vattn.vmm.driver import open_driver

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q `[n, Hq, D]` and k, v `[N, Hkv, D]` of one request, n = N or n = 1, to `[n, Hq, D]`. Causal."""

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 3
WHOLE, DECODE = "whole prompt", "one token"


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = scaled_dot_product_attention(*batched, is_causal=len(q) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    attend = torch.compile(flex_attention) if q.is_cuda else flex_attention
    mask = create_block_mask(causal, None, None, len(q), len(k), device=q.device) if len(q) > 1 else None
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = attend(*batched, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernel = importlib.import_module("flash_attn").flash_attn_func
    out: Tensor = kernel(*(x.unsqueeze(0) for x in (q, k, v)), causal=len(q) > 1)
    return out[0]


def flashinfer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = importlib.import_module("flashinfer")
    if len(q) == 1:
        one: Tensor = module.single_decode_with_kv_cache(q[0], k, v, kv_layout="NHD")
        return one.unsqueeze(0)
    out: Tensor = module.single_prefill_with_kv_cache(q, k, v, causal=True, kv_layout="NHD")
    return out


KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "flex": flex, "flash_attn": flash_attn, "flashinfer": flashinfer}


def full_row(
    layout: str, dtype: torch.dtype, device: str, page_bytes: int | None
) -> tuple[KVCache, int, int]:
    """A cache in which one request fills its pages to the last byte; its slot and its length."""
    driver = open_driver(device, **({"granularity": page_bytes} if page_bytes else {}))
    page, rows = driver.granularity, 3
    longest = 16 * page // (KV_HEADS * DIM * dtype.itemsize)
    cache = create_kv_cache(
        KVCacheConfig(
            backend="virtual",
            layout=KVLayout(layout).value,
            page_bytes=page,
            memory_bytes=400 * page,
            prefix_caching=False,
        ),
        KVShape(LAYERS, KV_HEADS, DIM, dtype),
        driver,
        max_model_len=None,
        model_len=longest,
        max_num_seqs=rows,
    )
    # Three layers: a token is 2^n or 3 x 2^n bytes, so three pages are whole tokens in both layouts.
    token = KV_HEADS * DIM * dtype.itemsize * (1 if layout == "per_layer" else 2 * LAYERS)
    length = 3 * page // token
    cache.attach("the row before", [0] * length)
    cache.attach("request", [0] * length)
    [slot] = cache.begin_step([Chunk("request", 0, length)]).slots
    cache.tensor[:, :, slot, :length].normal_()
    return cache, slot, length


def ordinary(view: Tensor) -> Tensor:
    """The same numbers with the same strides in memory of the usual kind."""
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device).copy_(view)


def compare(name: str, layout: str, dtype: torch.dtype, device: str, page_bytes: int | None) -> None:
    """Run a kernel on the row and on ordinary memory; raises AssertionError where they differ."""
    torch.manual_seed(0)
    cache, slot, length = full_row(layout, dtype, device, page_bytes)
    q = torch.randn(length, HEADS, DIM, device=device, dtype=dtype)
    for layer in (0, LAYERS - 1):
        k, v = (cache.tensor[layer, which, slot, :length] for which in (0, 1))
        for what, queries in ((WHOLE, q), (DECODE, q[-1:])):
            got = KERNELS[name](queries, k, v)
            expected = KERNELS[name](queries, ordinary(k), ordinary(v))
            assert got.isfinite().all()
            if name == "sdpa":
                assert torch.equal(got, expected), f"{what}: not the same bits"
            torch.testing.assert_close(got, expected, msg=lambda text: f"{what}: {text}")  # noqa: B023


def read_one_byte_too_far(layout: str) -> None:
    cache, slot, length = full_row(layout, torch.float32, "cpu", 4096)
    cache.tensor[LAYERS - 1, 1, slot, length, 0, 0].item()


def exit_code(act: Callable[[], object]) -> int:
    """How a forked child ends that does `act`: 0, 1 after an exception, -11 when the kernel kills it."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            torch.set_num_threads(1)  # the parent's worker threads do not exist here
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("layout", [str(layout) for layout in KVLayout])
def test_one_byte_behind_the_row_is_deadly(layout: str) -> None:
    assert exit_code(lambda: read_one_byte_too_far(layout)) == -signal.SIGSEGV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [str(layout) for layout in KVLayout])
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_pytorch_attends_over_virtual_memory_as_it_is(name: str, layout: str, dtype: torch.dtype) -> None:
    assert exit_code(lambda: compare(name, layout, dtype, "cpu", 4096)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", KERNELS)
def test_cuda_kernels_attend_over_virtual_memory_as_it_is(name: str) -> None:
    if name not in ("sdpa", "flex") and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for layout in KVLayout:
        # A process of its own: reading an unmapped page poisons the whole CUDA context.
        child = multiprocessing.get_context("spawn").Process(
            target=compare, args=(name, str(layout), torch.bfloat16, "cuda", None)
        )
        child.start()
        child.join()
        assert child.exitcode == 0, layout
