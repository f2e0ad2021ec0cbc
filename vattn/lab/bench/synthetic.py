"""Workloads with structure: common prefixes, conversations, several outputs of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vattn.errors import ConfigError
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import Workload, WorkloadRequest, check_counts, check_seed, random_tokens


@dataclass(frozen=True)
class SharedPrefixWorkload(Workload):
    """Requests of `groups` groups in random order; those of a group begin with the same `prefix_len` tokens.

    group 0   | prefix 0 . . . . . | own |      as many users of one system prompt, or
    group 1   | prefix 1 . . . . . | own |      many questions on one document
    group 0   | prefix 0 . . . . . | own |
    """

    name: ClassVar[str] = "shared-prefix"

    requests: int
    groups: int
    prefix_len: int
    prompt_len: Lengths
    """Tokens behind the prefix."""
    output_len: Lengths
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(requests=self.requests, groups=self.groups, prefix_len=self.prefix_len)
        check_seed(self.seed)

    @property
    def max_len(self) -> int:
        return self.prefix_len + self.prompt_len.high + self.output_len.high

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        rng = np.random.default_rng(self.seed)
        prefixes = [random_tokens(rng, self.prefix_len, vocab_size) for _ in range(self.groups)]
        members = [i % self.groups for i in range(self.requests)]
        rng.shuffle(members)
        prompts = self.prompt_len.draw(rng, self.requests)
        outputs = self.output_len.draw(rng, self.requests)
        return [
            WorkloadRequest(prefixes[group] + random_tokens(rng, p, vocab_size), o)
            for group, p, o in zip(members, prompts, outputs, strict=True)
        ]

    def parameters(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "groups": self.groups,
            "prefix_len": self.prefix_len,
            "prompt_len": self.prompt_len.describe(),
            "output_len": self.output_len.describe(),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class ChatWorkload(Workload):
    """Conversations of `turns` turns; each turn's prompt contains what was said before it.

    The first turns start with the same `prefix_len` tokens (a system prompt; 0: none). Between an answer
    and the next turn lies a think time, exponential with mean `think_s` seconds.
    """

    name: ClassVar[str] = "chat"

    sessions: int
    turns: int
    prompt_len: Lengths
    """Tokens a turn adds."""
    output_len: Lengths
    prefix_len: int = 0
    think_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(sessions=self.sessions, turns=self.turns)
        check_seed(self.seed)
        if self.prefix_len < 0:
            raise ConfigError(f"prefix_len must not be negative, got {self.prefix_len}")
        if not 0 <= self.think_s < float("inf"):
            raise ConfigError(f"the think time must be at least 0 seconds, got {self.think_s}")

    @property
    def max_len(self) -> int:
        return self.prefix_len + self.turns * (self.prompt_len.high + self.output_len.high)

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        """Turn by turn over all sessions, in which order an engine that answers at once would see them."""
        rng = np.random.default_rng(self.seed)
        prefix = random_tokens(rng, self.prefix_len, vocab_size)
        requests = []
        for turn in range(self.turns):
            prompts = self.prompt_len.draw(rng, self.sessions)
            outputs = self.output_len.draw(rng, self.sessions)
            thinking = rng.exponential(self.think_s, self.sessions) if turn else np.zeros(self.sessions)
            requests += [
                WorkloadRequest(
                    ([] if turn else prefix) + random_tokens(rng, prompts[i], vocab_size),
                    outputs[i],
                    session=f"chat-{i}",
                    think_s=float(thinking[i]),
                )
                for i in range(self.sessions)
            ]
        return requests

    def parameters(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "turns": self.turns,
            "prefix_len": self.prefix_len,
            "think_s": self.think_s,
            "prompt_len": self.prompt_len.describe(),
            "output_len": self.output_len.describe(),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class ParallelSamplingWorkload(Workload):
    """Unrelated requests that want `n` outputs each: the prompt's memory can be shared between them."""

    name: ClassVar[str] = "parallel-sampling"
    beams: ClassVar[bool] = False

    requests: int
    n: int
    prompt_len: Lengths
    output_len: Lengths
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(requests=self.requests, n=self.n)
        check_seed(self.seed)

    @property
    def max_len(self) -> int:
        return self.prompt_len.high + self.output_len.high

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        rng = np.random.default_rng(self.seed)
        prompts = self.prompt_len.draw(rng, self.requests)
        outputs = self.output_len.draw(rng, self.requests)
        return [
            WorkloadRequest(random_tokens(rng, p, vocab_size), o, n=self.n, beams=self.beams)
            for p, o in zip(prompts, outputs, strict=True)
        ]

    def parameters(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "n": self.n,
            "prompt_len": self.prompt_len.describe(),
            "output_len": self.output_len.describe(),
            "seed": self.seed,
        }


class BeamSearchWorkload(ParallelSamplingWorkload):
    """Unrelated requests answered by a beam search of width `n`: memory is forked at every step."""

    name: ClassVar[str] = "beam-search"
    beams: ClassVar[bool] = True
