"""How long attention takes, in measured runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from vattn.attention.base import StepAttention, StepTimer

Report = Callable[[int, float], None]
"""Receives (step, seconds)."""


class AttentionTimer(StepTimer):
    """Times every layer's call, storing K and V included.

    On a CPU with the clock; on CUDA with events, which are read when the run is over, so that nothing waits
    for the device. Decodes from captured graphs do not pass here and stay untimed.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        """Number of the step whose calls come next."""
        self._cuda = device.type == "cuda"
        self._seconds: dict[int, float] = {}
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, step: StepAttention) -> StepAttention:
        return _TimedStep(self, step)

    def report(self, to: Report) -> None:
        """Hand over every step's time, once; waits for the device."""
        for step, start, end in self._events:
            end.synchronize()
            self._add(step, start.elapsed_time(end) / 1e3)
        self._events.clear()
        for step, seconds in self._seconds.items():
            to(step, seconds)
        self._seconds.clear()

    def _add(self, step: int, seconds: float) -> None:
        self._seconds[step] = self._seconds.get(step, 0.0) + seconds

    def _timed(self, call: Callable[[], Tensor]) -> Tensor:
        if not self._cuda:
            start = perf_counter()
            result = call()
            self._add(self.step, perf_counter() - start)
            return result
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        result = call()
        events[1].record()
        self._events.append((self.step, events[0], events[1]))
        return result


class _TimedStep:
    def __init__(self, timer: AttentionTimer, inner: StepAttention) -> None:
        self._timer, self._inner = timer, inner

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._timer._timed(lambda: self._inner.attend(layer, q, k, v, scale))
