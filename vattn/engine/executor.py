"""What runs a step that the engine has planned: the one place where engines differ.

    Engine                          Executor
    plan ──── launch(items) ──────> start the step; never wait for the device
         <─── handle ─────────────
    …         (plan the next one)
         ──── collect(handle) ────> wait for its tokens
         <─── StepResult ─────────

    TorchExecutor    the model on this device                        vattn/engine/torch_executor.py
    NullExecutor     nothing: what the engine's own work costs       vattn/lab/bench/engine_bench.py
    PricedExecutor   nothing, but it knows how long it would take    vattn/lab/simulator/executor.py
    ScriptedExecutor the tokens of an event log                      vattn/engine/replay_script.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vattn.outputs import TokenLogprobs

if TYPE_CHECKING:
    from vattn.engine.request import Request
    from vattn.engine.scheduler import Scheduled
    from vattn.sampling.beam import Candidate

Handle = Any
"""A launched step, as its executor knows it."""


@dataclass(frozen=True)
class StepResult:
    """What came out of a step."""

    token_ids: list[int]
    """Of the items that sample, in their order. Negative: no token (`sampling_failure`)."""
    logprobs: list[TokenLogprobs | None] | None = None
    """Of the same items; None where not asked for. None: nobody asked."""
    prompt_logprobs: Sequence[tuple[Request, list[TokenLogprobs | None]]] = ()
    """Entries of prompts, for requests that asked for them."""
    beams: dict[Request, list[Candidate]] = field(default_factory=dict)
    """What may follow each beam, best first."""


class Executor(ABC):
    """Runs steps, one behind the other. Driven by one thread."""

    overlaps: bool = False
    """Whether it is worth launching a step before the last one's tokens are known."""

    @abstractmethod
    def launch(self, items: Sequence[Scheduled], behind: Handle | None) -> Handle:
        """Start a step. Does not wait for the device.

        `behind`: the step in flight, if its tokens are not known yet: a request with `pending_row` takes its
        newest token from that row. Memory for all items is there. If it raises, the step has not happened.
        """

    @abstractmethod
    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step's tokens. Steps are collected in the order of their launch, each once."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds on the clock that this executor's steps take their time from."""

    def cache_moved(self) -> None:  # noqa: B027
        """The KV cache has other addresses now, or is about to be used for the first time."""
