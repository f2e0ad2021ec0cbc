"""The contestants: every kernel that can read a place, called the way an engine calls it.

A contestant is made once per problem, with everything that depends on lengths planned; then `call(i)`
attends over layer i of the place. What it returns is `[queries, q_heads, head_dim]` in order, whatever its
shape, so that nothing is copied while the clock runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.memory import Place
from benchmarks.gpu.problems import DTYPE, Problem
from vattn.attention.device import to_device
from vattn.attention.triton import ContiguousTriton, PagedTriton
from vattn.kernels.split import SplitBuffers
from vattn.kv.base import AttentionInputs, ContiguousInputs, PagedInputs

Attend = Callable[[int], Tensor]

TOLERANCE = 1e-2
"""Of ‖out - reference‖ / ‖reference‖ with bfloat16 operands."""


def triton(problem: Problem, inputs: AttentionInputs, q: Tensor) -> Attend:
    """vattn's kernels, with the split plan the engine would make."""
    backend = ContiguousTriton() if isinstance(inputs, ContiguousInputs) else PagedTriton()
    on_device = to_device(inputs, q.device)
    out = torch.full_like(q, float("nan"))
    layers = inputs.kv.unbind(0)
    where = {backend.place: on_device.places}
    if problem.kind == "prefill":

        def prefill(i: int) -> Tensor:
            keys, values = layers[i % len(layers)]
            backend.kernels.prefill(
                q, keys, values, cu_seqlens=on_device.cu_seqlens, seq_lens=on_device.seq_lens,
                max_query_len=on_device.max_query_len, out=out, **where,
            )  # fmt: skip
            return out

        return prefill
    plan = backend.split_plan(inputs.seq_lens, problem.heads.kv_heads)
    buffers = SplitBuffers(len(q), q.shape[1], q.shape[2], plan, q.device)
    splits = buffers if plan.num_splits > 1 else None

    def decode(i: int) -> Tensor:
        keys, values = layers[i % len(layers)]
        backend.kernels.decode(q, keys, values, seq_lens=on_device.seq_lens, splits=splits, out=out, **where)
        return out

    return decode


def _sdpa(which: SDPBackend) -> Callable[[Problem, AttentionInputs, Tensor], Attend]:
    def make(problem: Problem, inputs: AttentionInputs, q: Tensor) -> Attend:
        layers = inputs.kv.unbind(0)
        heads = problem.heads
        queries = q.view(problem.batch, -1, heads.q_heads, heads.head_dim).transpose(1, 2)

        def attend(i: int) -> Tensor:
            kv = layers[i % len(layers)][:, : problem.batch, : problem.context].transpose(2, 3)
            with sdpa_kernel(which):
                out = scaled_dot_product_attention(
                    queries, kv[0], kv[1], is_causal=problem.kind == "prefill", enable_gqa=True
                )
            return out.transpose(1, 2)

        return attend

    return make


def flash_attn(problem: Problem, inputs: AttentionInputs, q: Tensor) -> Attend:
    """flash-attn 2 on rows, unchanged."""
    kernel = importlib.import_module("flash_attn").flash_attn_with_kvcache
    layers = inputs.kv.unbind(0)
    on_device = to_device(inputs, q.device)
    queries = q.view(problem.batch, -1, *q.shape[1:])

    def attend(i: int) -> Tensor:
        out: Tensor = kernel(
            queries, *layers[i % len(layers)], cache_seqlens=on_device.seq_lens,
            cache_batch_idx=on_device.places, causal=True,
        )  # fmt: skip
        return out

    return attend


def flashinfer(problem: Problem, inputs: AttentionInputs, q: Tensor) -> Attend:
    """flashinfer's kernels for block tables; on rows, each row is one page of the length of a row."""
    module = importlib.import_module("flashinfer")
    kv, heads = inputs.kv, problem.heads
    page = kv.shape[3]
    if isinstance(inputs, PagedInputs):
        blocks, counts = inputs.blocks()
        indices, per_request = blocks.tolist(), counts[0]
    else:
        assert isinstance(inputs, ContiguousInputs)
        indices, per_request = inputs.slots, 1

    def int32(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=q.device)

    table = (
        int32(b * per_request for b in range(problem.batch + 1)),
        int32(indices),
        int32([problem.context - (per_request - 1) * page] * problem.batch),
        *(heads.q_heads, heads.kv_heads, heads.head_dim, page),
    )
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    layers = kv.unbind(0)
    if problem.kind == "decode":
        run = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        run.plan(*table, q_data_type=DTYPE, kv_data_type=DTYPE)
    else:
        run = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts = int32(b * problem.context for b in range(problem.batch + 1))
        run.plan(starts, *table, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE)
    return lambda i: run.run(q, tuple(layers[i % len(layers)]))


Make = Callable[[Problem, AttentionInputs, Tensor], Attend]
KERNELS: dict[str, Make] = {
    "triton": triton,
    "sdpa flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash_attn": flash_attn,
    "flashinfer": flashinfer,
}

ROWS = ("virtual interleaved", "virtual per_layer", "static per_layer")


def contestants() -> list[tuple[str, str]]:
    """(kernel, name of the place), the pairs that are compared."""
    pairs = [("triton", place) for place in (*ROWS, "paged 16", "paged 64", "paged 256")]
    pairs += [("sdpa flash", place) for place in ROWS]
    pairs += [("sdpa cudnn", "static per_layer")]
    pairs += [("flash_attn", place) for place in ROWS[:2]]
    return pairs + [("flashinfer", place) for place in (*ROWS[:2], "paged 16")]


def unavailable(kernel: str, device: torch.device) -> str | None:
    """Why a kernel cannot run here; None if it can be tried."""
    if kernel in ("flash_attn", "flashinfer") and importlib.util.find_spec(kernel) is None:
        return "not installed"
    if kernel not in ("triton", "sdpa flash") and device.type != "cuda":
        return "needs a GPU"
    return None


def relative_error(problem: Problem, place: Place, q: Tensor, out: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ over the first and the last request, layer 0, in float64.

    Of a prompt: eight tokens at its start, in its middle and at its end. NaN if anything is not finite.
    """
    wrong, norm = 0.0, 0.0
    group = problem.heads.q_heads // problem.heads.kv_heads
    per_request = problem.queries // problem.batch
    for b in {0, problem.batch - 1}:
        keys, values = place.keys_values(0, b).double()
        at = torch.arange(per_request, device=q.device)
        if per_request > 24:
            middle = per_request // 2
            at = torch.cat([at[:8], at[middle : middle + 8], at[-8:]])
        rows = at + b * per_request
        seen = at + problem.context - per_request
        queries = q[rows].double().view(len(rows), -1, group, q.shape[2])
        scores = torch.einsum("nhgd,lhd->hgnl", queries, keys) * q.shape[2] ** -0.5
        hidden = torch.arange(problem.context, device=q.device)[None] > seen[:, None]
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        expected = torch.einsum("hgnl,lhd->nhgd", weights, values).flatten(1, 2)
        wrong += (out[rows].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return math.sqrt(wrong / norm)
