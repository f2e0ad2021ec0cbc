"""CPU attention against a plain float64 softmax, over views with strides, mixed batches and GQA."""

from __future__ import annotations

import pytest
import torch

from vattn.attention.sdpa import ContiguousSdpa, GatherSdpa
from vattn.kv.base import ContiguousInputs, PagedInputs


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, Hq, D] are the last n of k's L tokens; k, v [L, Hkv, D]. float64, head by head."""
    n, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    out = torch.empty_like(q, dtype=torch.float64)
    for h in range(heads):
        kh, vh = k[:, h // (heads // kv_heads)].double(), v[:, h // (heads // kv_heads)].double()
        for i in range(n):
            seen = total - n + i + 1
            weights = torch.softmax(kh[:seen] @ q[i, h].double() * scale, 0)
            out[i, h] = weights @ vh[:seen]
    return out


# (tokens before, new tokens) per request: decodes, whole prompts, chunks behind a context, one-token prompts
BATCHES = {
    "decode": [(4, 1), (0, 1), (31, 1)],
    "prefill": [(0, 7), (0, 20)],
    "chunk": [(13, 6), (1, 2)],
    "mixed": [(9, 1), (30, 1), (0, 12), (5, 1), (11, 3), (2, 1)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (6, 1, 40)])
@pytest.mark.parametrize("memory", ["rows", "blocks"])
def test_attention_equals_the_oracle(batch: str, heads: int, kv_heads: int, dim: int, memory: str) -> None:
    torch.manual_seed(0)
    chunks = BATCHES[batch]
    tokens = sum(new for _, new in chunks)
    layers, layer, length, block = 2, 1, 48, 8
    cu = [0]
    for _, new in chunks:
        cu.append(cu[-1] + new)
    lens = [before + new for before, new in chunks]
    q, k, v = (torch.randn(tokens, h, dim) for h in (heads, kv_heads, kv_heads))
    past = [torch.randn(2, before, kv_heads, dim) for before, _ in chunks]

    # Garbage, NaN even, wherever no token of the request lies: it must not be read.
    if memory == "rows":
        kv = torch.full((len(chunks) + 1, length, layers, 2, kv_heads, dim), float("nan"))
        kv = kv.permute(2, 3, 0, 1, 4, 5)
        where = [[(b + 1) * length + i for i in range(n)] for b, n in enumerate(lens)]
    else:
        per = -(-length // block)
        order = torch.randperm(per * len(chunks)).tolist()
        tables = [order[b * per : b * per + -(-n // block)] for b, n in enumerate(lens)]
        kv = torch.full((layers, 2, len(order), block, kv_heads, dim), float("nan"))
        where = [
            [t[i // block] * block + i % block for i in range(n)] for t, n in zip(tables, lens, strict=True)
        ]
    flat = kv.flatten(2, 3)
    for w, old in zip(where, past, strict=True):
        flat[layer][:, w[: old.shape[1]]] = old
    mapping = torch.tensor([i for w, (before, _) in zip(where, chunks, strict=True) for i in w[before:]])
    common = {"kv": kv, "cu_seqlens": cu, "seq_lens": lens, "slot_mapping": mapping}
    if memory == "rows":
        step = ContiguousSdpa().plan(ContiguousInputs(**common, slots=list(range(1, len(chunks) + 1))))
    else:
        step = GatherSdpa().plan(PagedInputs(**common, block_tables=tables, block_size=block))

    got = step.attend(layer, q, k, v, 0.3)

    assert got.shape == (tokens, heads, dim)
    for b, old in enumerate(past):
        new = slice(cu[b], cu[b + 1])
        keys, values = torch.cat([old[0], k[new]]), torch.cat([old[1], v[new]])
        torch.testing.assert_close(got[new].double(), oracle(q[new], keys, values, 0.3), atol=1e-5, rtol=1e-5)
        stored = flat[layer][:, where[b]]
        assert torch.equal(stored, torch.stack([keys, values])), "new tokens are stored, old ones kept"
    assert flat[0].isnan().all(), "other layers are untouched"
