"""Describes an engine at one moment, as JSON (`vattn-snapshot-1`)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vattn.kv.page_map import IN_USE, PageMap, PageState

if TYPE_CHECKING:
    from vattn.engine.engine import Engine
    from vattn.engine.request import Request

FORMAT = "vattn-snapshot-1"


def take_snapshot(
    engine: Engine, *, model: Mapping[str, Any], limits: Mapping[str, Any], kv: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe the engine between two steps. Memory, page map and requests are from the same moment.

        format, time_s (since 1970), pid
        model        sizes, as in a bench JSON       limits    the engine's limits, set at its start
        kv           backend, layout, page or block size, current budget_bytes
        memory       `MemoryUsage`                   swap      used_bytes, budget_bytes; null without swap
        metrics      `EngineMetrics` with `KVStats`, since the start
        rates        `Watch.rates`, over the last seconds
        requests     running and waiting requests, oldest first: see `_describe`
        lengths      histograms of finished requests: prompt, output, total
        page_map     `PageMap`

    All times are in seconds, all memory in bytes.
    """
    page_map = engine.kv.page_map()
    swap = engine.kv.swap
    return {
        "format": FORMAT,
        "time_s": time.time(),
        "pid": os.getpid(),
        "model": dict(model),
        "limits": dict(limits),
        "kv": {"backend": engine.kv.name, **kv, "budget_bytes": engine.kv.budget_bytes},
        "memory": page_map.usage.to_dict(),
        "swap": None if swap is None else {"used_bytes": swap.used_bytes, "budget_bytes": swap.budget_bytes},
        "metrics": replace(engine.metrics, kv_stats=engine.kv.stats()).to_dict(),
        "rates": engine.watch.rates(),
        "requests": _requests(engine, page_map),
        "lengths": engine.watch.lengths(),
        "page_map": page_map.to_dict(),
    }


def _requests(engine: Engine, page_map: PageMap) -> list[dict[str, Any]]:
    now = time.perf_counter()
    held: dict[str | None, tuple[int, int]] = {}
    for row in page_map.rows:
        states = [page_map.states[unit] for unit in row.units]
        held[row.owner] = (sum(s in IN_USE for s in states), states.count(PageState.SHARED))
    described = []
    for request in sorted(engine.requests(), key=lambda r: r.arrival):
        units, shared = held.get(request.request_id, (0, 0))
        described.append(
            {
                **_describe(request, now),
                "swapped": engine.kv.swapped(request.request_id),
                "kv_bytes": units * page_map.unit_bytes,
                "kv_shared_bytes": shared * page_map.unit_bytes,
            }
        )
    return described


def _describe(request: Request, now: float) -> dict[str, Any]:
    """Describe one request, or one branch of it.

    - `status`: running, waiting, or held (until others of its group are ready).
    - `computed_tokens`: tokens of prompt and output whose K and V are written.
    - `kv_bytes`: memory that the request uses, including shared pages.
    - `kv_shared_bytes`: the part of `kv_bytes` that other requests use too.
    """
    return {
        "id": request.request_id,
        "status": str(request.status),
        "tenant": request.service.tenant,
        "priority": request.service.priority,
        "prompt_tokens": len(request.prompt_token_ids),
        "output_tokens": len(request.output_token_ids),
        "max_tokens": request.max_tokens,
        "computed_tokens": request.num_computed,
        "cached_tokens": request.metrics.num_cached_tokens,
        "preemptions": request.metrics.num_preemptions,
        "age_s": now - request.metrics.arrival_time,
    }
