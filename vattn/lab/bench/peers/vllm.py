"""vLLM, in this process, when the user has it installed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from vattn.errors import ConfigError
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.target import Finished, System, Target

if TYPE_CHECKING:
    from vattn.models.loader import LoadedModel


class Vllm(System):
    """`LLMEngine` with the same checkpoint, dtype and limits, stepped as ours is.

    The KV budget is given as `num_gpu_blocks_override`, so that it is the same number of bytes.
    """

    peer: ClassVar[bool] = True

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self.name = "vllm"
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError as why:
            raise ConfigError(f"--peer vllm: vLLM can't be imported here ({why}); pip install vllm") from why
        if loaded.path is None:
            raise ConfigError("--peer vllm needs a model on disk or on the hub, not one made in memory")
        spec = loaded.spec
        block = 16
        self.options: dict[str, Any] = {
            "model": loaded.path,
            "dtype": spec.dtype_name,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "block_size": block,
            "num_gpu_blocks_override": max(1, limits.kv_memory_bytes // (block * spec.kv_token_bytes)),
            "skip_tokenizer_init": True,
        }

    @contextmanager
    def open(self) -> Iterator[Target]:
        engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**self.options))
        try:
            yield _EngineTarget(self._vllm, engine, self.options)
        finally:
            shutdown = getattr(getattr(engine, "engine_core", None), "shutdown", None)
            if shutdown is not None:
                shutdown()


class _EngineTarget(Target):
    def __init__(self, vllm: Any, engine: Any, options: dict[str, Any]) -> None:
        self._vllm, self._engine = vllm, engine
        self._times: dict[str, list[list[float]]] = {}
        self.kv = {
            "backend": "paged",
            "block_size": options["block_size"],
            "num_blocks": options["num_gpu_blocks_override"],
        }

    def clock(self) -> float:
        return time.perf_counter()

    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        if beams:
            raise ConfigError("vLLM's engine has no beam search: leave --peer out")
        params = self._vllm.SamplingParams(
            n=n,
            temperature=0.0 if n == 1 else 1.0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
        )
        self._times[request_id] = [[] for _ in range(n)]
        self._engine.add_request(request_id, {"prompt_token_ids": prompt_token_ids}, params)

    def advance(self, wait_s: float) -> list[Finished]:
        if not self._engine.has_unfinished_requests():
            time.sleep(wait_s)
            return []
        ended = []
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            times = self._times[output.request_id]
            for completion in output.outputs:
                seen = times[completion.index]
                seen += [now] * (len(completion.token_ids) - len(seen))
            if output.finished:
                del self._times[output.request_id]
                first = output.outputs[0]
                ended.append(
                    Finished(
                        output.request_id,
                        list(first.token_ids),
                        times,
                        finish_reason=first.finish_reason,
                        cached_tokens=output.num_cached_tokens or 0,
                    )
                )
        return ended
