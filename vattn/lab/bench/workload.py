"""What is asked of an engine: requests, and the simplest way of making them up.

A workload says *what* is asked; `arrivals` says *when*. Everything follows from one seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vattn.errors import ConfigError
from vattn.lab.bench.lengths import Lengths


@dataclass(frozen=True)
class WorkloadRequest:
    """One request; EOS is ignored, so it produces exactly `output_len` tokens (each of its `n` outputs).

    Turns of one `session` follow each other. A turn's prompt is all that was said before it, answers
    included, and then its own tokens; it is sent `think_s` seconds after the answer to the turn before:

        turn 1   | own tokens |                                   -> answer 1
        turn 2   | own tokens | answer 1 | own tokens |           -> answer 2
    """

    prompt_token_ids: list[int]
    """The prompt; of a later turn in a session, what it adds to the conversation."""
    output_len: int
    n: int = 1
    """Outputs sampled from the same prompt."""
    beams: bool = False
    """The `n` outputs are found by beam search instead."""
    session: str | None = None
    think_s: float = 0.0
    """Seconds between the answer to the session's turn before and this one."""
    arrival_s: float | None = None
    """When it is sent, in seconds after the start, if the workload itself says so."""


class Workload(ABC):
    """A set of requests that can be made again, exactly."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Tokens of the longest request there may be, prompt and output."""

    @abstractmethod
    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        """The requests in the order in which they are sent, the same for the same vocabulary."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What, beside the name, tells this workload from others."""

    def describe(self) -> dict[str, Any]:
        """For a report: the name and the parameters."""
        return {"name": self.name, **self.parameters()}


@dataclass(frozen=True)
class RandomWorkload(Workload):
    """Unrelated requests of random tokens.

    Lengths are `Lengths`, or [low, high]: then prompts are log-uniform and outputs uniform.
    """

    name: ClassVar[str] = "random"

    requests: int = 32
    prompt_len: tuple[int, int] | Lengths = (16, 512)
    output_len: tuple[int, int] | Lengths = (16, 128)
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(requests=self.requests)
        check_seed(self.seed)
        for name, lengths in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            if not isinstance(lengths, Lengths) and not 1 <= lengths[0] <= lengths[1]:
                raise ConfigError(f"{name} needs 1 <= low <= high, got {lengths[0]}:{lengths[1]}")

    @property
    def prompt_lengths(self) -> Lengths:
        return (
            self.prompt_len
            if isinstance(self.prompt_len, Lengths)
            else Lengths("loguniform", *self.prompt_len)
        )

    @property
    def output_lengths(self) -> Lengths:
        return (
            self.output_len if isinstance(self.output_len, Lengths) else Lengths("uniform", *self.output_len)
        )

    @property
    def max_len(self) -> int:
        return self.prompt_lengths.high + self.output_lengths.high

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        rng = np.random.default_rng(self.seed)
        prompts = self.prompt_lengths.draw(rng, self.requests)
        outputs = self.output_lengths.draw(rng, self.requests)
        return [
            WorkloadRequest(random_tokens(rng, p, vocab_size), o)
            for p, o in zip(prompts, outputs, strict=True)
        ]

    def parameters(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "prompt_len": self.prompt_lengths.describe(),
            "output_len": self.output_lengths.describe(),
            "seed": self.seed,
        }


def random_tokens(rng: np.random.Generator, n: int, vocab_size: int) -> list[int]:
    tokens: list[int] = rng.integers(0, vocab_size, n).tolist()
    return tokens


def check_counts(**counts: int) -> None:
    """Raise ConfigError unless each is at least one."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"a workload needs at least one of its {name}, got {count}")


def check_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
