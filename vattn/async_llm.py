"""`AsyncLLM`: generate from asyncio. Many tasks share one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeVar

from vattn.chat import Message
from vattn.engine.deltas import RequestDelta
from vattn.engine.loop import Submission
from vattn.engine.mailbox import Mailbox
from vattn.engine.output_collector import OutputCollector
from vattn.engine.service import DEFAULT_TENANT, Service
from vattn.errors import RequestError
from vattn.kv.usage import MemoryUsage
from vattn.llm import LLM
from vattn.metrics import EngineMetrics
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, RequestOutputKind, SamplingParams
from vattn.prompts import Prompt, TokenizedPrompt

T = TypeVar("T")


class AsyncLLM:
    """An `LLM` for asyncio. Any number of tasks of one event loop may use it at once.

    Takes the arguments of `LLM`, or an existing `LLM`. The owner of an existing `LLM` must close it.

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._owns = not isinstance(model, LLM)
        self.llm: LLM = model if isinstance(model, LLM) else LLM(model, **options)

    @classmethod
    async def create(cls, model: Any, **options: Any) -> Self:
        """Load the model in a thread, so that the event loop is not blocked."""
        return await asyncio.to_thread(cls, model, **options)

    # ------------------------------------------------------------------ generate
    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        timeout_s: float | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield an output after each token. `SamplingParams.output_kind` says what it holds.

        `prompt` is a prompt or a conversation. For a conversation, `template` holds the arguments of
        `LLM.chat` that concern its chat template. The last output is finished. Leaving the loop, calling
        `aclose` or cancelling the task aborts the request.
        Raises RequestError, CapacityError or QueueFull if the request is refused, StepError if its step
        fails.
        """
        tokenized = await asyncio.to_thread(self.llm.read_prompt, prompt, **template)
        async for output in self._run(tokenized, sampling_params, Service(priority, tenant, timeout_s)):
            yield output

    async def _run(
        self, prompt: TokenizedPrompt, params: SamplingParams | BeamSearchParams | None, service: Service
    ) -> AsyncIterator[RequestOutput]:
        params = self.llm.get_default_sampling_params() if params is None else params
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise RequestError(f"sampling_params are SamplingParams, not {type(params).__name__}")
        stream = isinstance(params, SamplingParams) and params.output_kind is not RequestOutputKind.FINAL_ONLY
        mailbox = _TaskMailbox(asyncio.get_running_loop())
        loop = self.llm.loop
        try:
            submission = Submission(prompt.token_ids, params, service, prompt.cache_salt, stream)
            [request_id] = loop.submit([submission], mailbox, wait=False)
            vocabulary = self.llm.engine.intake.vocabulary
            collector = OutputCollector(request_id, prompt.text, prompt.token_ids, params, vocabulary)
            while not collector.finished:
                for delta in await mailbox.get():
                    if delta.failure is not None:
                        raise delta.failure
                    if not collector.add(delta):
                        await self.abort(request_id)
                    yield collector.output()
                    if collector.finished:
                        break
        finally:
            loop.leave(mailbox)

    async def abort(self, request_id: str) -> bool:
        """End a request now. Its iterator gets the output so far. Returns False if it is not running."""
        return await self._call(lambda: self.llm.abort(request_id))

    # ------------------------------------------------------------------ look, memory
    async def memory_usage(self) -> MemoryUsage:
        """The memory that the KV cache holds now, in bytes."""
        return await self._call(self.llm.memory_usage)

    async def metrics(self) -> EngineMetrics:
        """A copy of the counters since this engine started."""
        return await self._call(self.llm.metrics)

    async def snapshot(self) -> dict[str, Any]:
        """Like `LLM.snapshot`."""
        return await self._call(self.llm.snapshot)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._call(self.llm.reset_prefix_cache)

    async def resize_kv_cache(self, memory_bytes: int) -> None:
        """Like `LLM.resize_kv_cache`."""
        await self._call(lambda: self.llm.resize_kv_cache(memory_bytes))

    async def sleep(self) -> None:
        """Give all KV memory back to the device. Requests wait until `wake_up`, then go on."""
        await self._call(self.llm.sleep)

    async def wake_up(self) -> None:
        """End `sleep`. Raises ConfigError if the memory is no longer available."""
        await self._call(self.llm.wake_up)

    async def check(self) -> None:
        """Raise AssertionError unless the records of the scheduler and the cache agree."""
        await self._call(self.llm.check)

    @staticmethod
    async def _call(call: Callable[[], T]) -> T:
        """Run a call in a thread, because it waits for the current step."""
        return await asyncio.to_thread(call)

    # ------------------------------------------------------------------ end
    def close(self) -> None:
        """Abort all requests and free everything. Waits for the current step. Idempotent."""
        if self._owns:
            self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._call(self.close)


class _TaskMailbox(Mailbox):
    """A mailbox for an asyncio task that waits for reports."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news: asyncio.Queue[Sequence[RequestDelta] | Exception] = asyncio.Queue()

    def put(self, deltas: Sequence[RequestDelta]) -> None:
        self._send(deltas)

    def fail(self, error: Exception) -> None:
        self._send(error)

    def _send(self, news: Sequence[RequestDelta] | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:  # the event loop was closed
            self.closed = True

    async def get(self) -> Sequence[RequestDelta]:
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news


