"""`AsyncLLM`: generate from asyncio; one engine, many tasks."""

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
    """An `LLM` for asyncio: any number of tasks of one event loop may use it at once.

    Takes the arguments of `LLM`, or an `LLM` that is there already, whose owner then closes it.

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._owns = not isinstance(model, LLM)
        self.llm: LLM = model if isinstance(model, LLM) else LLM(model, **options)

    @classmethod
    async def create(cls, model: Any, **options: Any) -> Self:
        """Load in a thread, so that the event loop goes on meanwhile."""
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
        """Yield the request as it stands after each of its tokens (`SamplingParams.output_kind`).

        `prompt`: a prompt, or a conversation; then `template` are those arguments of `LLM.chat` that its
        template gets. The last output is finished. Leaving the loop, `aclose` and the task's cancellation
        abort the request.
        Raises RequestError, CapacityError or QueueFull when it is refused, StepError when its step failed.
        """
        tokenized = await asyncio.to_thread(self.llm.read_prompt, prompt, **template)
        async for output in self._run(tokenized, sampling_params, Service(priority, tenant, timeout_s)):
            yield output

    async def _run(
        self, prompt: TokenizedPrompt, params: SamplingParams | BeamSearchParams | None, service: Service
    ) -> AsyncIterator[RequestOutput]:
        params = params or SamplingParams()
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
        """End a request now; whoever iterates over it gets what it has. False: it does not run."""
        return await self._call(lambda: self.llm.abort(request_id))

    # ------------------------------------------------------------------ look, memory
    async def memory_usage(self) -> MemoryUsage:
        """What the KV cache holds right now, in bytes."""
        return await self._call(self.llm.memory_usage)

    async def metrics(self) -> EngineMetrics:
        """Counters since this engine started; a copy."""
        return await self._call(self.llm.metrics)

    async def snapshot(self) -> dict[str, Any]:
        """`LLM.snapshot`."""
        return await self._call(self.llm.snapshot)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._call(self.llm.reset_prefix_cache)

    async def resize_kv_cache(self, memory_bytes: int) -> None:
        """`LLM.resize_kv_cache`."""
        await self._call(lambda: self.llm.resize_kv_cache(memory_bytes))

    async def sleep(self) -> None:
        """Give all KV memory back to the device. Requests wait, and go on after `wake_up`."""
        await self._call(self.llm.sleep)

    async def wake_up(self) -> None:
        """End `sleep`. Raises ConfigError if the memory is not there any more."""
        await self._call(self.llm.wake_up)

    async def check(self) -> None:
        """Raise AssertionError unless every book of scheduler and cache balances."""
        await self._call(self.llm.check)

    @staticmethod
    async def _call(call: Callable[[], T]) -> T:
        """In a thread: it waits for the step that runs."""
        return await asyncio.to_thread(call)

    # ------------------------------------------------------------------ end
    def close(self) -> None:
        """Abort what runs and give everything back; waits for the step that runs. Idempotent."""
        if self._owns:
            self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._call(self.close)


class _TaskMailbox(Mailbox):
    """A mailbox that a task waits at."""

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


