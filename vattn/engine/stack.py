"""Builds everything that serves one model from the bottom up, and closes it from the top down.

    driver -> KV cache -> event log -> engine -> coordinator entry -> loop

The stack holds no reference to the `LLM`, so it can be closed when the `LLM` is garbage collected.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.blueprint import open_trace
from vattn.engine.build import build_engine
from vattn.engine.engine import Engine
from vattn.engine.events import EventLog
from vattn.engine.loop import EngineLoop
from vattn.engine.openmp import release_workers
from vattn.engine.sizing import activation_bytes
from vattn.errors import ConfigError
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache, open_kv_driver
from vattn.kv.layout import KVShape
from vattn.models.loader import LoadedModel
from vattn.models.rope import longest_stretched
from vattn.vmm.driver import Driver

if TYPE_CHECKING:
    from vattn.scale.member import Member


class EngineStack:
    """Builds everything, or raises and leaves nothing behind. Most arguments are those of `LLM`.

    `shape` is the shape of the KV cache.
    """

    engine: Engine
    kv: KVCache
    loop: EngineLoop

    def __init__(
        self,
        loaded: LoadedModel,
        kv_config: KVCacheConfig,
        limits: SchedulerConfig,
        shape: KVShape,
        *,
        max_model_len: int | None,
        driver: Driver | None,
        trace: str | Path | None,
        attention: str,
        overlap: bool | None,
        enforce_eager: bool | None,
        seed: int,
        coordinator: str | Path | None,
        engine_name: str | None,
    ) -> None:
        self.device = next(loaded.model.parameters()).device
        self._own_driver: Driver | None = None
        self._kv: KVCache | None = None
        self._trace = EventLog()
        self.member: Member | None = None
        self._lock = threading.RLock()
        self._done = False
        positions = loaded.spec.max_model_len
        longest = longest_stretched(loaded.config) or positions
        if max_model_len is not None and max_model_len > longest:
            raise ConfigError(
                f"max_model_len={max_model_len:,} is more than the model's {longest:,} positions"
            )
        model_len = max(positions, max_model_len or 0)
        self._loan = loaded.lease.take(stretched=model_len > positions)
        try:
            if driver is None:
                driver = self._own_driver = open_kv_driver(self.device)
            self.driver = driver
            self.kv = self._kv = create_kv_cache(
                kv_config,
                shape,
                driver,
                max_model_len=max_model_len,
                model_len=model_len,
                max_num_seqs=limits.max_num_seqs,
                activations=self._activations(loaded, limits),
                fingerprint=loaded.fingerprint,
            )
            self.max_model_len = self.kv.capacity_tokens if max_model_len is None else max_model_len
            self.kv_memory_bytes = self.kv.budget_bytes
            if trace is not None:
                self._trace = open_trace(
                    trace,
                    limits,
                    kv_config,
                    self.kv,
                    granularity=driver.granularity,
                    max_model_len=self.max_model_len,
                    model_len=model_len,
                )
            self.engine = build_engine(
                loaded,
                self.kv,
                limits,
                max_model_len=self.max_model_len,
                attention=attention,
                overlap=overlap,
                enforce_eager=enforce_eager,
                seed=seed,
                trace=self._trace,
                loan=self._loan,
            )
            if coordinator is not None:
                self.member = self._join(coordinator, engine_name or loaded.name)
        except BaseException:
            self._release()
            raise
        release_workers()  # this thread has loaded and measured; the loop computes from here on
        self.loop = EngineLoop(self.engine)

    def _activations(self, loaded: LoadedModel, limits: SchedulerConfig) -> int:
        """Bytes of device memory that one step needs; 0 on a CPU, where KV has its own share of memory."""
        if self.device.type != "cuda":
            return 0
        return activation_bytes(loaded.model, limits.max_num_batched_tokens, limits.max_num_seqs)

    def _join(self, coordinator: str | Path, name: str) -> Member:
        from vattn.scale.membership import join

        return join(self.engine, coordinator, name=name, device=self.device, resize=self.resize)

    # ------------------------------------------------------------------ in the engine's thread
    def resize(self, memory_bytes: int) -> None:
        """Give the cache another budget. Raises ConfigError, and changes nothing, if memory is short."""
        self._require_memory("resize_kv_cache", memory_bytes)
        self.engine.resize_kv(memory_bytes)

    def wake_up(self) -> None:
        """End the engine's sleep. Raises ConfigError if the memory is no longer available."""
        if self.engine.asleep:
            self._require_memory("wake_up", self.engine.awake_budget)
        self.engine.wake_up()

    def _require_memory(self, what: str, memory_bytes: int) -> None:
        free, total = self.driver.memory_info()
        if memory_bytes - self.kv.usage().physical > free:
            raise ConfigError(
                f"{what}: {memory_bytes:,} bytes asked for, {free:,} of {total:,} are free on {self.device}"
            )

    # ------------------------------------------------------------------ the end
    def give_back(self) -> None:
        """Stop the loop and free everything. Idempotent. After a DriverError, another call continues.

        A forked child process that inherited the stack frees nothing: everything belongs to the parent.
        """
        if not self.loop.owner.here:
            return
        if self.loop.is_current:  # garbage collected inside a step: change nothing now
            self.loop.stop(then=self._release)
            return
        self.loop.stop()
        self._release()

    def _release(self) -> None:
        with self._lock:
            if self._done:
                return
            self._loan.give_back()
            if self.member is not None:
                self.member.leave()
            self._trace.close()
            try:
                if self._kv is not None:
                    self._kv.close()
            finally:
                if self._own_driver is not None:
                    self._own_driver.close()  # gives back what the cache could not
            self._done = True
