"""Choices by name, as a command line has them, and every combination of several.

--backend virtual,paged  --sweep block_size=8,16  --sweep gpu=h100,h200

backend  block_size  gpu          virtual has no blocks: its two equal runs are one
virtual  .           h100
virtual  .           h200
paged    8           h100   …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from vattn.errors import ConfigError
from vattn.lab.simulator.cost import CallSeconds, Efficiency

Choices = Mapping[str, Any]

ASSUMPTIONS = {f.name for f in fields(Efficiency)} | {f"{f.name}_seconds" for f in fields(CallSeconds)}
"""Parameters of the cost model."""
KNOBS = (
    "model", "gpu", "tp", "backend", "kv_layout", "page_bytes", "block_size", "kv_memory", "kv_cache_dtype",
    "weight_dtype", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization",
    "mapping", "overlap", "prefix_caching",
)  # fmt: skip
_OF_BACKEND = {
    "block_size": ("paged",),
    "page_bytes": ("virtual",),
    "kv_layout": ("virtual", "static"),
    "mapping": ("virtual",),
    "prefix_caching": ("paged", "virtual"),
}
"""Knobs that only some backends have."""


def combinations(base: Choices, swept: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of the swept values over `base`, by a name that says what differs.

    Combinations that differ only in knobs their backend lacks are one. Raises ConfigError for unknown
    knobs.
    """
    for name in swept:
        if name not in KNOBS and name not in ASSUMPTIONS:
            known = ", ".join([*KNOBS, *sorted(ASSUMPTIONS)])
            raise ConfigError(f"--sweep {name}: unknown; sweep one of {known}")
    runs: dict[str, dict[str, Any]] = {}
    for values in product(*swept.values()):
        choices = {**base, **dict(zip(swept, values, strict=True))}
        backend = choices["backend"]
        said = [
            (name, value)
            for name, value in zip(swept, values, strict=True)
            if name == "backend" or (len(swept[name]) > 1 and backend in _OF_BACKEND.get(name, (backend,)))
        ]
        title = " ".join(str(v) if n in ("backend", "model", "gpu") else f"{n}={v}" for n, v in said)
        runs.setdefault(title or backend, choices)
    return runs
