"""Enters an engine in the coordinator file and keeps its entry up to date while it steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from vattn.engine.listener import StepListener
from vattn.scale.coordinator import Coordinator, default_path
from vattn.scale.member import Member, Report, smallest_budget

if TYPE_CHECKING:
    from vattn.engine.engine import Engine

CoordinatorPath = str | Path | Literal["default"]
"""A file, or this user's default one."""


def join(
    engine: Engine, path: CoordinatorPath, *, name: str, device: torch.device, resize: Callable[[int], None]
) -> Member:
    """Enter `engine`. From then on it writes and follows the file before its steps.

    Raises CoordinatorError if the file can't be used or has no room for the engine, and VattnError or
    DriverError if the engine can't take its budget. The engine is not entered then.
    """
    coordinator = Coordinator(default_path() if path == "default" else path)
    member = Member(
        coordinator,
        name=name,
        device=device_key(device),
        asked=engine.kv.budget_bytes,
        floor=smallest_budget(engine.kv, engine.max_model_len),
        resize=resize,
        report=lambda: Report(engine.kv.usage().in_use, status(engine)),
    )
    engine.listeners.append(_Beat(engine, member))
    return member


class _Beat(StepListener):
    """Makes a member follow the file between steps."""

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine = engine
        self._member = member

    def step_begins(self) -> None:
        self._member.beat()

    def step_ended(self, failed: bool) -> None:
        if not self._engine.scheduler.has_work:
            self._member.rest()


def device_key(device: torch.device) -> str:
    """A name of the device that is the same in every process, whatever index the device has there."""
    if device.type != "cuda":
        return device.type
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"


def status(engine: Engine) -> dict[str, Any]:
    """What `vattn top` shows."""
    usage, swap = engine.kv.usage(), engine.kv.swap
    return {
        "backend": engine.kv.name,
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "memory": {
            "in_use": usage.in_use,
            "parked": usage.parked,
            "cached": usage.cached,
            "free": usage.free,
            "physical": usage.physical,
            "shared_saved": usage.shared_saved,
        },
        "swap_used_bytes": 0 if swap is None else swap.used_bytes,
        "preemptions": engine.scheduler.num_preemptions,
        "output_tokens": engine.metrics.output_tokens,
        "rates": engine.watch.rates(),
    }
