"""Synthetic requests: lengths drawn from a distribution, tokens drawn at random, all from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vattn.errors import ConfigError


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: its prompt and how many tokens it will produce (EOS is ignored)."""

    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class RandomWorkload:
    """`requests` requests; prompt lengths log-uniform, output lengths uniform, in [low, high].

    Log-uniform: most prompts are short, a few are long, as in served traffic.
    """

    requests: int = 32
    prompt_len: tuple[int, int] = (16, 512)
    output_len: tuple[int, int] = (16, 128)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"a workload needs at least one request, got {self.requests}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        for name, (low, high) in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            if not 1 <= low <= high:
                raise ConfigError(f"{name} needs 1 <= low <= high, got {low}:{high}")

    @property
    def max_len(self) -> int:
        """Tokens of the longest request this may draw."""
        return self.prompt_len[1] + self.output_len[1]

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        """The requests, the same ones for the same seed and vocabulary."""
        rng = np.random.default_rng(self.seed)
        prompts = _log_uniform(rng, self.prompt_len, self.requests)
        outputs = rng.integers(self.output_len[0], self.output_len[1] + 1, self.requests).tolist()
        return [
            WorkloadRequest(rng.integers(0, vocab_size, p).tolist(), o)
            for p, o in zip(prompts, outputs, strict=True)
        ]


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int], n: int) -> list[int]:
    low, high = bounds
    drawn = np.exp(rng.uniform(math.log(low), math.log(high + 1), n)).astype(int)
    return [int(x) for x in np.clip(drawn, low, high)]
