"""transformers' continuous batching (the manager behind `generate_batch`)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import ContinuousBatchingConfig, GenerationConfig

from vattn.errors import ConfigError, VattnError
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.target import Finished, System, Target
from vattn.lab.bench.tiny import TINY, load_tiny
from vattn.models.loader import LoadedModel, load_model

PAGE_TOKENS = 256
"""Tokens in a block, transformers' default."""
SILENCE_S = 120.0
"""A run that gives nothing for this long is broken."""


class GenerateBatch(System):
    """The same checkpoint, as transformers loads it, with its own attention and linear layers."""

    peer: ClassVar[bool] = True

    def __init__(self, model: str, loaded: LoadedModel, limits: Limits) -> None:
        self.name = "generate_batch"
        spec = loaded.spec
        blocks = limits.kv_memory_bytes // (PAGE_TOKENS * spec.kv_token_bytes)
        needed = math.ceil(limits.max_model_len / PAGE_TOKENS) + 1
        if blocks < needed:
            raise ConfigError(
                f"generate_batch needs {needed} blocks of {PAGE_TOKENS} tokens for one request of "
                f"{limits.max_model_len:,} and the budget has {blocks}: raise --kv-memory"
            )
        self.options: dict[str, Any] = {
            "num_blocks": blocks,
            "max_batch_tokens": limits.max_num_batched_tokens,
            "max_requests_per_batch": limits.max_num_seqs,
        }
        device = next(loaded.model.parameters()).device
        if model == TINY:
            own = load_tiny(str(device), str(spec.dtype)).model
            own.set_attn_implementation("sdpa")  # type: ignore[operator]
        else:
            own = load_model(
                model, device=device, dtype=spec.dtype, attn_implementation="sdpa", prepare=False
            ).model
        self._model: Any = own

    @contextmanager
    def open(self) -> Iterator[Target]:
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**self.options),
        )
        manager.start()
        try:
            yield _ManagerTarget(manager, copy.copy(self.options))
        finally:
            manager.stop(block=True)


class _ManagerTarget(Target):
    """Its thread generates and notes when each token came; we only hand in and collect."""

    def __init__(self, manager: Any, kv: dict[str, str | int]) -> None:
        self._manager = manager
        self._running = 0
        self.kv = {"backend": "paged", "block_size": PAGE_TOKENS, "num_blocks": kv["num_blocks"]}

    def clock(self) -> float:
        return time.perf_counter()

    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        if n != 1:
            raise ConfigError("generate_batch has no parallel sampling per request: leave --peer out")
        self._manager.add_request(
            prompt_token_ids, request_id=request_id, max_new_tokens=output_len, record_timestamps=True
        )
        self._running += 1

    def advance(self, wait_s: float) -> list[Finished]:
        if not self._running:
            time.sleep(wait_s)
            return []
        result = self._manager.get_result(timeout=min(wait_s, SILENCE_S))
        if result is None:
            if wait_s >= SILENCE_S or not self._manager.is_running():
                raise VattnError("generate_batch stopped giving results")
            return []
        if not result.is_finished():
            return []
        self._running -= 1
        started = result.lifespan[0]
        return [
            Finished(
                result.request_id,
                list(result.generated_tokens),
                [list(result.timestamps or [])],
                error=result.error,
                first_scheduled=started if started >= 0 else None,
            )
        ]
