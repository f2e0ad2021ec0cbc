"""What engines are compared on: models, requests and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vattn.lab.bench.workload import RandomWorkload


@dataclass(frozen=True)
class Plan:
    """One model's comparison. `share`: of the time that is left when it begins."""

    model: str
    share: float
    saturation: RandomWorkload
    low_load: tuple[RandomWorkload, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: int
    rounds: int = 2

    @property
    def max_model_len(self) -> int:
        return max(w.max_len for w in (self.saturation, *self.low_load))

    def work(self) -> dict[str, RandomWorkload]:
        """By name; saturation first."""
        low = {f"low load, {w.requests} at once": w for w in self.low_load}
        return {"saturation": self.saturation, **low}

    def describe(self) -> dict[str, Any]:
        """The plan, for the record."""
        return {
            "work": {name: vars(workload) for name, workload in self.work().items()},
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.kv_bytes,
        }


def low_load(prompt: int, output: int, *requests: int) -> tuple[RandomWorkload, ...]:
    return tuple(RandomWorkload(n, (prompt, prompt), (output, output), seed=n) for n in requests)


PLANS = (
    Plan(
        "Llama-3-8B", 0.7, RandomWorkload(160, (128, 2048), (64, 256)), low_load(512, 64, 1, 8),
        max_num_seqs=128, max_num_batched_tokens=4096, kv_bytes=20 << 30,
    ),
    Plan(
        "Qwen3-1.7B", 1.0, RandomWorkload(192, (128, 2048), (64, 256)), low_load(512, 64, 1, 8),
        max_num_seqs=128, max_num_batched_tokens=4096, kv_bytes=18 << 30,
    ),
)  # fmt: skip
DRY_PLANS = (
    Plan(
        "tiny", 1.0, RandomWorkload(6, (8, 40), (3, 6)), low_load(12, 4, 1),
        max_num_seqs=4, max_num_batched_tokens=32, kv_bytes=8 << 20,
    ),
)  # fmt: skip
