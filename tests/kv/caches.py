"""Small caches of every backend for the tests of this folder."""

from __future__ import annotations

import torch

from vattn.config import KVCacheConfig
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape
from vattn.vmm.host import HostDriver

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=12, dtype=torch.float32)
MAX_TOKENS = 96
MAX_ROWS = 5
GRANULARITY = 4096  # 10 interleaved tokens and two thirds: rows straddle pages

BACKENDS = {
    "virtual-interleaved": {"backend": "virtual", "layout": "interleaved", "page_bytes": GRANULARITY},
    "virtual-per_layer": {"backend": "virtual", "layout": "per_layer"},
    "virtual-background": {
        "backend": "virtual",
        "layout": "interleaved",
        "page_bytes": GRANULARITY,
        "background_mapping": True,
    },
    "paged-1": {"backend": "paged", "block_size": 1},
    "paged-16": {"backend": "paged", "block_size": 16},
    "static-interleaved": {"backend": "static", "layout": "interleaved"},
    "static-per_layer": {"backend": "static", "layout": "per_layer"},
}


def make_cache(
    backend: str, budget_tokens: int, *, fingerprint: str | None = None, unit: int | None = None
) -> KVCache:
    """A cache whose budget holds about `budget_tokens`, and always one request of MAX_TOKENS.

    `fingerprint`: with a prefix cache, of `unit` tokens where that is not the block.
    """
    options = dict(BACKENDS[backend])
    if unit is not None and options["backend"] == "virtual":
        options["block_size"] = unit
    budget = budget_tokens * SHAPE.token_bytes
    if options["backend"] == "virtual":  # whole pages in every range
        ranges = 1 if options["layout"] == "interleaved" else 2 * SHAPE.num_layers
        budget = max(budget, 2 * GRANULARITY * ranges) + GRANULARITY * ranges
    elif options["backend"] == "paged":
        budget = max(budget, 16 * MAX_TOKENS // 16 * SHAPE.token_bytes)
    return create_kv_cache(
        KVCacheConfig(memory_bytes=budget, **options),  # type: ignore[arg-type]
        SHAPE,
        HostDriver(granularity=GRANULARITY),
        max_model_len=MAX_TOKENS,
        model_len=MAX_TOKENS,
        max_num_seqs=MAX_ROWS,
        fingerprint=fingerprint,
    )
