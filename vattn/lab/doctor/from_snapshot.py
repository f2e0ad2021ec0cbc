"""A case from a snapshot of a running engine (`LLM.snapshot()`): one moment, and the last seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vattn.engine.snapshot import FORMAT
from vattn.errors import ConfigError
from vattn.lab.doctor.case import Case, Length, Steps

__all__ = ["FORMAT", "snapshot_case"]


def snapshot_case(record: Mapping[str, Any]) -> Case:
    """Raises ConfigError for a snapshot without its parts."""
    try:
        return _case(record)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a damaged snapshot: {error!r}") from error


def _case(record: Mapping[str, Any]) -> Case:
    kv, limits, metrics, rates = record["kv"], record["limits"], record["metrics"], record["rates"]
    model, page_map, memory = record["model"], record["page_map"], record["memory"]
    status = [r["status"] for r in record["requests"]]
    seconds = float(rates["window_s"] or 0.0)
    busy = seconds * float(rates["busy_share"] or 0.0)
    per_step = rates["tokens_per_s"] / rates["steps_per_s"] if rates["steps_per_s"] else 0.0
    moment = {
        "duration_s": 1.0,
        "tokens": per_step,
        "decodes": min(per_step, status.count("running")),
        "running": status.count("running"),
        "waiting": status.count("waiting"),
        **{k: memory[k] for k in ("in_use", "logical", "shared_saved", "tail_waste", "external_waste")},
    }
    hits = rates["prefix_hit_rate"]
    return Case(
        name=f"the engine, process {record.get('pid', '?')}",
        backend=str(kv["backend"]),
        model=model,
        budget=float(kv["budget_bytes"]),
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
        steps=Steps(**{name: np.array([moment[name]], np.float64) for name in Steps.__dataclass_fields__}),
        lengths=[Length(b["tokens"] / b["count"], 0.0, b["count"]) for b in record["lengths"]["total"]],
        finished=round(rates["finished_requests_per_s"] * seconds),
        preemptions=rates["preemptions_per_s"] * seconds,
        swap_bytes=rates["swap_bytes_per_s"] * seconds,
        map_stall_s=float(rates["map_stall_share"] or 0.0) * busy,
        busy_s=busy,
        prefix_queries=float(metrics.get("prefix_query_tokens") or 0),
        prefix_hits=float(metrics.get("prefix_query_tokens") or 0) * float(hits or 0.0),
        token_bytes=page_map["unit_bytes"] / page_map["unit_tokens"] if page_map["unit_tokens"] else None,
        unit_tokens=page_map["unit_tokens"],
        unit_bytes=kv.get("page_bytes"),
        layout=str(kv.get("layout", "")),
        kv_dtype=str(kv.get("kv_cache_dtype", "auto")),
        preemption=str(limits.get("preemption", "recompute")),
        background_mapping=bool(limits.get("background_mapping")),
        device=str(model.get("device", "cpu")),
    )
