"""Every attention implementation that runs on a CPU, against a plain float64 softmax: views with strides,
mixed batches, grouped heads, and garbage wherever no token lies."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from vattn.attention.base import AttentionBackend
from vattn.attention.flex import ContiguousFlex, PagedFlex
from vattn.attention.sdpa import ContiguousSdpa, GatherSdpa
from vattn.attention.triton import ContiguousTriton, PagedTriton
from vattn.kernels.launch import interpreted
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


IMPLEMENTATIONS: dict[str, tuple[type[AttentionBackend], str]] = {
    "sdpa": (ContiguousSdpa, "rows"),
    "gather": (GatherSdpa, "blocks"),
    "flex": (ContiguousFlex, "rows"),
    "paged flex": (PagedFlex, "blocks"),
}
if interpreted():
    IMPLEMENTATIONS = {"triton": (ContiguousTriton, "rows"), "paged triton": (PagedTriton, "blocks")}
# (tokens before, new tokens) per request: decodes, whole prompts, chunks behind a context, one-token prompts
BATCHES = {
    "decode": [(4, 1), (0, 1), (31, 1)],
    "prefill": [(0, 7), (0, 20)],
    "chunk": [(13, 6), (1, 2)],
    "mixed": [(9, 1), (30, 1), (0, 12), (5, 1), (11, 3), (2, 1)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (6, 1, 40)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attention_equals_the_oracle(batch: str, heads: int, kv_heads: int, dim: int, name: str) -> None:
    torch.manual_seed(0)
    implementation, memory = IMPLEMENTATIONS[name]
    chunks = BATCHES[batch]
    tokens = sum(new for _, new in chunks)
    layers, layer, length, block = 2, 1, 48, 8
    cu = [0]
    for _, new in chunks:
        cu.append(cu[-1] + new)
    lens = [before + new for before, new in chunks]
    q, k, v = (torch.randn(tokens, h, dim) for h in (heads, kv_heads, kv_heads))
    past = [torch.randn(2, before, kv_heads, dim) for before, _ in chunks]

    # Garbage wherever no token of the request lies; NaN even, unless whole blocks are masked by weights of 0.
    garbage = 1e3 if name == "paged flex" else float("nan")
    if memory == "rows":
        kv = torch.full((len(chunks) + 1, length, layers, 2, kv_heads, dim), garbage)
        kv = kv.permute(2, 3, 0, 1, 4, 5)
        where = [[(b + 1) * length + i for i in range(n)] for b, n in enumerate(lens)]
    else:
        per = -(-length // block)
        order = torch.randperm(per * len(chunks)).tolist()
        tables = [order[b * per : b * per + -(-n // block)] for b, n in enumerate(lens)]
        kv = torch.full((layers, 2, len(order), block, kv_heads, dim), garbage)
        where = [
            [t[i // block] * block + i % block for i in range(n)] for t, n in zip(tables, lens, strict=True)
        ]
    flat = kv.flatten(2, 3)
    for w, old in zip(where, past, strict=True):
        flat[layer][:, w[: old.shape[1]]] = old
    mapping = torch.tensor([i for w, (before, _) in zip(where, chunks, strict=True) for i in w[before:]])
    common = {"kv": kv, "cu_seqlens": cu, "seq_lens": lens, "slot_mapping": mapping}
    if memory == "rows":
        step = implementation().plan(ContiguousInputs(**common, slots=list(range(1, len(chunks) + 1))))
    else:
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        step = implementation().plan(PagedInputs(**common, block_tables=padded, block_size=block))

    got = step.attend(layer, q, k, v, 0.3)

    assert got.shape == (tokens, heads, dim)
    for b, old in enumerate(past):
        new = slice(cu[b], cu[b + 1])
        keys, values = torch.cat([old[0], k[new]]), torch.cat([old[1], v[new]])
        torch.testing.assert_close(got[new].double(), oracle(q[new], keys, values, 0.3), atol=1e-5, rtol=1e-5)
        stored = flat[layer][:, where[b]]
        assert torch.equal(stored, torch.stack([keys, values])), "new tokens are stored, old ones kept"
    untouched = torch.full_like(flat[0], garbage)
    assert torch.equal(flat[0].nan_to_num(), untouched.nan_to_num()), "other layers are untouched"


@pytest.mark.skipif(interpreted(), reason="this is the child")
def test_the_triton_kernels_give_the_same_in_the_interpreter() -> None:
    """Whether kernels are interpreted is settled when triton is imported: hence a process of its own."""
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-3000:]
    assert "24 passed" in child.stdout
