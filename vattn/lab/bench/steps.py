"""The truth about memory in every step of an engine, column by column."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vattn.kv.usage import MemoryUsage

MEMORY = (
    "in_use",
    "parked",
    "cached",
    "free",
    "physical",
    "logical",
    "shared_saved",
    "tail_waste",
    "external_waste",
)
"""Columns in bytes, as `MemoryUsage` has them."""


class StepLog:
    """One row per step that ran the model, as columns of equal length.

    - `time_s`, `duration_s`: when it was begun and how long the engine took, in seconds. A call that only
      collects the last tokens belongs to the step that made them.
    - `tokens`, `decodes`: tokens computed, and how many of them were decodes.
    - `running`, `waiting`: requests, after the step was scheduled.
    - memory, in bytes, when the step was launched.
    - `preemptions`, `map_stall_s`: what happened in this step alone.
    - `attention_s`: time in attention, all layers; None where it can't be told (captured graphs).
    """

    def __init__(self) -> None:
        names = ("time_s", "duration_s", "tokens", "decodes", "running", "waiting")
        tail = ("preemptions", "map_stall_s", "attention_s")
        self.columns: dict[str, list[Any]] = {name: [] for name in (*names, *MEMORY, *tail)}

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def add(
        self,
        *,
        time_s: float,
        tokens: int,
        decodes: int,
        running: int,
        waiting: int,
        usage: MemoryUsage,
        preemptions: int,
        map_stall_s: float,
    ) -> None:
        """A step was launched; its durations follow."""
        memory = asdict(usage)
        row = {
            "time_s": time_s,
            "duration_s": 0.0,
            "tokens": tokens,
            "decodes": decodes,
            "running": running,
            "waiting": waiting,
            **{name: memory[name] for name in MEMORY},
            "preemptions": preemptions,
            "map_stall_s": map_stall_s,
            "attention_s": None,
        }
        for name, value in row.items():
            self.columns[name].append(value)

    def took(self, seconds: float) -> None:
        """The engine spent this long on the last step."""
        if len(self):
            self.columns["duration_s"][-1] += seconds

    def attended(self, step: int, seconds: float) -> None:
        """Attention took this long in a step."""
        self.columns["attention_s"][step] = (self.columns["attention_s"][step] or 0.0) + seconds

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns for a report; microseconds are kept."""
        return {
            name: [round(v, 6) if isinstance(v, float) else v for v in values]
            for name, values in self.columns.items()
        }

    def metrics(self) -> dict[str, float | int | None]:
        """Peaks and shares over the whole run; None where there is nothing to take a share of."""
        c = self.columns
        held = [a + b + k for a, b, k in zip(c["in_use"], c["parked"], c["cached"], strict=True)]
        mapped = sum(c["in_use"]) + sum(c["shared_saved"])
        timed = [(a, d) for a, d in zip(c["attention_s"], c["duration_s"], strict=True) if a is not None]

        def share(part: float, whole: float) -> float | None:
            return part / whole if whole else None

        return {
            "steps": len(self),
            "peak_kv_bytes": max(held, default=0),
            "peak_physical_bytes": max(c["physical"], default=0),
            "peak_in_use_bytes": max(c["in_use"], default=0),
            "peak_running": max(c["running"], default=0),
            "mean_running": share(sum(c["running"]), len(self)),
            "kv_utilization": share(sum(c["logical"]), mapped),
            "tail_waste_share": share(sum(c["tail_waste"]), mapped),
            "external_waste_share": share(sum(c["external_waste"]), mapped),
            "shared_saved_share": share(sum(c["shared_saved"]), mapped),
            "attention_s": sum(a for a, _ in timed) if timed else None,
            "attention_share": share(sum(a for a, _ in timed), sum(d for _, d in timed)),
        }
