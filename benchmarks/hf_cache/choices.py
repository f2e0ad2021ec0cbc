"""The figures behind two defaults on CPU: which layout attention reads faster, and what a page size costs.

python benchmarks/hf_cache/choices.py [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from vattn import VirtualCache

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"smollm2": (9, 3, 64, 8), "llama": (32, 8, 64, 4)}  # query heads, KV heads, dim, layers
PAGES = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "hf_cache_choices.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rounds, contexts, tokens = options.rounds, [2048, 8192], 1024
    if options.smoke:
        rounds, contexts, tokens = 1, [64], 32
    report = {
        "attention_s": [
            {
                "model": name,
                "context": context,
                "dtype": str(dtype)[6:],
                **_attention(shape, context, dtype, rounds),
            }
            for name, shape in SHAPES.items()
            for context in contexts
            for dtype in (torch.float32, torch.bfloat16)
        ],
        "update_s": _pages(tokens, rounds),
    }
    for row in report["attention_s"]:
        title = f"{row['model']} {row['context']} {row['dtype']}"
        for kernel in ("sdpa, grouped heads", "sdpa, packed heads", "eager"):
            own = statistics.median(row[kernel]["own tensor"])
            cells = (
                f"{layout} {1e3 * statistics.median(times):.2f} ms ({statistics.median(times) / own:.2f}x)"
                for layout, times in row[kernel].items()
            )
            print(f"{title:24}{kernel:22}{'   '.join(cells)}")
    for page, times in report["update_s"].items():
        middle = 1e6 * statistics.median(times)
        print(f"update, pages of {int(page) // 1024:2} KiB: {middle:.1f} us per layer and token")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _attention(shape: tuple[int, ...], context: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Seconds of one query token's attention in a layer, by kernel and by where K and V lie."""
    query_heads, heads, dim, layers = shape
    group = query_heads // heads
    query = torch.randn(1, query_heads, 1, dim, dtype=dtype)
    states = [torch.randn(2, 1, heads, context, dim, dtype=dtype) for _ in range(layers)]
    caches = [VirtualCache(max_len=context, layout=layout) for layout in ("heads", "tokens")]
    places = {"own tensor": [tuple(pair) for pair in states]}
    for cache, layout in zip(caches, ("heads", "tokens"), strict=True):
        places[layout] = [cache.update(*pair, layer) for layer, pair in enumerate(states)]

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, None].expand(-1, -1, group, -1, -1).reshape(1, query_heads, context, dim)

    kernels: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sdpa, grouped heads": lambda k, v: scaled_dot_product_attention(query, k, v, enable_gqa=True),
        "sdpa, packed heads": lambda k, v: scaled_dot_product_attention(
            query.view(1, heads, group, dim), k, v
        ),
        "eager": lambda k, v: torch.softmax(query @ repeated(k).transpose(2, 3), -1) @ repeated(v),
    }
    times: dict[str, Any] = {kernel: {place: [] for place in places} for kernel in kernels}
    for _ in range(rounds):
        for kernel, attend in kernels.items():
            for place, pairs in places.items():
                start = time.perf_counter()
                for keys, values in pairs:
                    attend(keys, values)
                times[kernel][place].append((time.perf_counter() - start) / layers)
    return times


def _pages(tokens: int, rounds: int) -> dict[int, list[float]]:
    """Seconds to append one token to one layer of SmolLM2, pages included, by page size."""
    query_heads, heads, dim, layers = SHAPES["smollm2"]
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        hidden_size=query_heads * dim,
        max_position_embeddings=8192,
    )
    state = torch.randn(1, heads, 1, dim)
    times: dict[int, list[float]] = {page: [] for page in PAGES}
    for _ in range(rounds):
        for page in PAGES:
            cache = VirtualCache(config, page_bytes=page)
            start = time.perf_counter()
            for _ in range(tokens):
                for layer in range(layers):
                    cache.update(state, state, layer)
            times[page].append((time.perf_counter() - start) / layers / tokens)
    return times


if __name__ == "__main__":
    main()
