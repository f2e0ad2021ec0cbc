"""What the backends make of the same memory: the demo model's KV, a served-like workload, no model needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.test_scheduler import Harness, Traffic
from vattn.config import KVCacheConfig
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape
from vattn.lab.bench.engine_bench import NullExecutor
from vattn.lab.bench.workload import RandomWorkload
from vattn.vmm.accounting import AccountingDriver

SMOLLM2 = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.float32)
MAX_MODEL_LEN = 2048
STATIC_ROWS = 4
BUDGET = STATIC_ROWS * MAX_MODEL_LEN * SMOLLM2.token_bytes


class BudgetHarness(Harness):
    """The scheduler over a cache of the demo model's shape; watches memory after every step."""

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__("static", 1 << 20, seqs=1, tokens=8)
        self.kv: KVCache = create_kv_cache(
            replace(config, memory_bytes=BUDGET),
            SMOLLM2,
            AccountingDriver(granularity=64 << 10),
            max_model_len=MAX_MODEL_LEN,
            model_len=8192,
            max_num_seqs=64,
        )
        self.scheduler.kv = self.scheduler.preemption.kv = self.engine.kv = self.kv
        self.engine.executor = NullExecutor(self.kv)
        self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens = 64, 512

    def run(self, workload: RandomWorkload) -> tuple[int, float]:
        """(most requests running at once, worst bytes of tail waste per running request)."""
        for item in workload.generate(1000):
            self.add(Traffic(len(item.prompt_token_ids), item.output_len, 0, None))
        peak, waste = 0, 0.0
        while self.scheduler.has_work:
            running = len(self.scheduler.running)
            self.step()
            usage = self.kv.usage()
            peak = max(peak, running, len(self.scheduler.running))
            if self.scheduler.running:
                waste = max(waste, usage.tail_waste / len(self.scheduler.running))
        return peak, waste


@pytest.mark.parametrize(
    ("config", "unit"),
    [
        (KVCacheConfig(backend="virtual", layout="interleaved"), 1 << 20),
        (KVCacheConfig(backend="virtual", layout="per_layer"), 60 * (64 << 10)),
        (KVCacheConfig(backend="paged", block_size=16), 16 * SMOLLM2.token_bytes),
    ],
    ids=["virtual-interleaved", "virtual-per_layer", "paged"],
)
def test_four_times_the_requests_of_static_in_the_same_bytes(config: KVCacheConfig, unit: int) -> None:
    workload = RandomWorkload(32, (16, 512), (16, 128))
    static, _ = BudgetHarness(KVCacheConfig(backend="static")).run(workload)
    peak, waste = BudgetHarness(config).run(workload)
    assert static == STATIC_ROWS
    assert peak >= 4 * static
    assert waste <= unit, "at most one page (or block) per range and request is partly empty"
