"""`LLM`: generate from Python; the KV backend is one argument."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from vattn.chat import ChatReader, Message, is_conversation
from vattn.checks import flag, text, whole
from vattn.config import (
    DEFAULT_SWAP_BYTES,
    LARGEST,
    KVBackend,
    KVCacheConfig,
    KVDtype,
    LayoutName,
    PolicyName,
    PreemptionMode,
    SchedulerConfig,
    check_options,
)
from vattn.engine.listener import StepListener
from vattn.engine.runner import Runner
from vattn.engine.service import DEFAULT_TENANT, Service
from vattn.engine.stack import EngineStack
from vattn.engine.torch_executor import TorchExecutor
from vattn.errors import ConfigError, RequestError
from vattn.kv.ranges import KVRanges
from vattn.kv.usage import MemoryUsage
from vattn.metrics import EngineMetrics
from vattn.models.loader import LoadedModel, load_model
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, SamplingParams, each_params
from vattn.prompts import Prompt, PromptReader, TokenizedPrompt
from vattn.session import OutputStream, Session, run_all
from vattn.vmm.driver import Driver

C = TypeVar("C", KVCacheConfig, SchedulerConfig)


class LLM:
    """A model and its KV cache, ready to generate.

    Args:
        model: `"smollm2"` (the demo model), a Hugging Face hub id, a folder, a `.gguf` file, a
            transformers model in memory (it serves this engine alone until `close`), or a `LoadedModel`
            (weights may be shared by several engines, also those of `load_model(a model in memory)`).
        tokenizer: where the model brings none, or another one: a name, a folder, a transformers tokenizer
            or a `tokenizers.Tokenizer`.
        kv_config, scheduler_config: a whole `KVCacheConfig` or `SchedulerConfig`, instead of the single
            options below that they have.
        kv_backend: `"virtual"`, `"paged"` or `"static"`: who maps the KV cache.
        kv_layout: `"interleaved"`, `"per_layer"` or `"auto"`; of `virtual` and `static`.
        page_bytes: physical page of `virtual`; a multiple of the driver's granularity.
        block_size: tokens in a block of `paged`, and the unit in which prefixes are compared.
        enable_prefix_caching: keep what was computed for later requests that begin alike; it gives way
            before anybody is preempted. Default: where the backend can (`static` can't).
        preemption: what becomes of the KV of a request that yields its memory: `"recompute"`, `"swap"`
            (copied to host memory) or `"auto"`, what is predicted to cost less.
        swap_space_bytes: host memory for that; default: 4 GiB, none with `"recompute"`.
        kv_cache_dtype: `"auto"` (the model's), `"int8"` or `"fp8_e4m3"`: one byte a number.
        kv_scales: of a quantised cache: `"token"`, one per token and head, or static ones per head, from
            `vattn.lab.quality.calibrate`: a file, a mapping, or `KVRanges`.
        attention: the kernel: `"triton"`, `"sdpa"`, `"flex"` or `"flash_attn"` for contiguous memory,
            `"triton"`, `"gather"` or `"flex"` for paged; `"auto"`: Triton on CUDA, SDPA on CPU.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"`.
        dtype: `"auto"` (float32 on CPU, the checkpoint's on CUDA), a name or a `torch.dtype`.
        max_model_len: longest request, prompt and output; default: the model's, or what the cache holds.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens in one step; long prompts are cut into chunks.
        scheduling_policy: who goes first: `"fcfs"`, or `"priority"`, smaller priorities first.
        priority_ageing_tokens: so many tokens scheduled while a request waits are worth one unit of
            priority to it, so that nobody waits forever.
        fair_shares: weights of tenants, e.g. `{"a": 2.0}`; a tenant not named has 1. Tokens and memory
            are shared among the tenants that have requests, whoever sends more.
        max_waiting: requests of a tenant that may wait (default: any number); more get `QueueFull`.
        trace: file to log every decision of the scheduler in, as JSON lines (`vattn replay`). It holds
            the token ids of prompts and outputs.
        kv_cache_memory_bytes: budget of KV memory. Default: `gpu_memory_utilization` of the device,
            weights included; on CPU 4 GiB or that share of free memory.
        background_mapping: map pages ahead in a thread; default: on CUDA.
        overlap: launch each step before the last one's tokens are known to the host; default: on CUDA.
        enforce_eager: True: never decode from captured graphs. False: also where there is nothing to
            capture, padded as a graph would be. Default: graphs on CUDA, with `"triton"` attention.
        driver: virtual memory driver to map with; default: the device's own. It stays the caller's.
        coordinator: file through which engines share a device's memory (`vattn top`, `vattn limit`), or
            `"default"`, this user's own. Default: none, at no cost.
        engine_name: what it is called there; default: the model's name.
        seed: of requests that bring none.

    Raises `ConfigError`, `ModelNotFound`, `UnsupportedModel` or `DriverUnavailable`, before anything is
    left allocated. Methods may be called from several threads; they share the batch.
    """

    def __init__(
        self,
        model: str | Path | torch.nn.Module | LoadedModel,
        *,
        tokenizer: Any | None = None,
        kv_config: KVCacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        kv_backend: KVBackend = "virtual",
        kv_layout: LayoutName = "auto",
        page_bytes: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: KVDtype = "auto",
        kv_scales: str | Path | Mapping[str, Any] | KVRanges = "token",
        enable_prefix_caching: bool | None = None,
        preemption: PreemptionMode = "recompute",
        swap_space_bytes: int | None = None,
        attention: str = "auto",
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        scheduling_policy: PolicyName = "fcfs",
        priority_ageing_tokens: int = 16384,
        fair_shares: Mapping[str, float] | None = None,
        max_waiting: int | None = None,
        trace: str | Path | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        background_mapping: bool | None = None,
        overlap: bool | None = None,
        enforce_eager: bool | None = None,
        driver: Driver | None = None,
        coordinator: str | Path | None = None,
        engine_name: str | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        check_options(
            max_model_len=max_model_len,
            seed=seed,
            trace=trace,
            coordinator=coordinator,
            driver=driver,
            engine_name=engine_name,
            attention=attention,
            device=device,
            dtype=dtype,
            revision=revision,
            overlap=overlap,
            enforce_eager=enforce_eager,
            trust_remote_code=trust_remote_code,
        )
        seed, max_model_len = int(seed), None if max_model_len is None else int(max_model_len)
        how = scheduler_config.preemption if isinstance(scheduler_config, SchedulerConfig) else preemption
        if swap_space_bytes is None:
            recomputed = isinstance(how, str) and how == "recompute"
            swap_space_bytes = 0 if recomputed else DEFAULT_SWAP_BYTES
        self.kv_config = _one_of(
            kv_config,
            KVCacheConfig(
                backend=kv_backend,
                layout=kv_layout,
                page_bytes=page_bytes,
                block_size=block_size,
                memory_bytes=kv_cache_memory_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                background_mapping=background_mapping,
                dtype=kv_cache_dtype,
                scales=kv_scales,  # type: ignore[arg-type]
                prefix_caching=enable_prefix_caching,
                swap_space_bytes=swap_space_bytes,
            ),
            KVCacheConfig(swap_space_bytes=swap_space_bytes),
        )
        self.scheduler_config = _one_of(
            scheduler_config,
            SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens,
                policy=scheduling_policy,
                priority_ageing_tokens=priority_ageing_tokens,
                fair_shares={} if fair_shares is None else fair_shares,
                max_waiting=max_waiting,
                preemption=preemption,
            ),
            SchedulerConfig(64, 512),
        )
        if isinstance(model, LoadedModel):
            if not (isinstance(device, str) and isinstance(dtype, str) and device == dtype == "auto"):
                raise ConfigError("device and dtype belong to load_model: this model is loaded already")
            if tokenizer is not None:
                raise ConfigError("tokenizer belongs to load_model: this model is loaded already")
            self.loaded = model
        else:
            if not isinstance(model, (str, Path, torch.nn.Module)):
                raise ConfigError(f"model must be a name, a path or a model, not {type(model).__name__}")
            self.loaded = load_model(
                model,
                device=device,
                dtype=dtype,
                tokenizer=tokenizer,
                trust_remote_code=trust_remote_code,
                revision=revision,
                accept=self.kv_config.shape,
            )
        spec = self.loaded.spec
        self.kv_shape = self.kv_config.shape(spec)
        if max_model_len is not None and max_model_len > spec.max_model_len:
            raise ConfigError(
                f"max_model_len={max_model_len:,} is more than the model's {spec.max_model_len:,} positions"
            )
        self.stack = stack = EngineStack(
            self.loaded,
            self.kv_config,
            self.scheduler_config,
            self.kv_shape,
            max_model_len=max_model_len,
            driver=driver,
            trace=trace,
            attention=attention,
            overlap=overlap,
            enforce_eager=enforce_eager,
            seed=seed,
            coordinator=coordinator,
            engine_name=engine_name,
        )
        self.engine, self.loop, self.max_model_len = stack.engine, stack.loop, stack.max_model_len
        # Whatever becomes of this object, and at the interpreter's exit, everything is given back.
        self._end = weakref.finalize(self, stack.give_back)
        self._prompts = PromptReader(self.loaded.tokenizer, spec.vocab_size, self.max_model_len)
        self._chats = ChatReader(self._prompts)

    # ------------------------------------------------------------------ generate
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout_s: float | Sequence[float | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        `prompts`: text, token ids, a dict (`{"prompt": …}` or `{"prompt_token_ids": …}`), or a list of
        these. `sampling_params`, `priority`, `tenant`, `timeout_s`: one for all, or one each.
        `priority`: smaller is more urgent, under that policy. `tenant`: on whose account they run.
        `timeout_s`: seconds after which a request ends with what it has and `finish_reason="timeout"`.
        `use_tqdm`: show a progress bar.

        Raises RequestError if any prompt or parameter is refused, QueueFull if more would wait than
        `max_waiting` allows: then none was started.
        """
        flag("use_tqdm", use_tqdm)
        tokenized = self._prompts.read_all(prompts)
        params = each_params(sampling_params, len(tokenized))
        services = Service.each(len(tokenized), priority, tenant, timeout_s)
        return run_all(self.session(), tokenized, params, services, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout_s: float | Sequence[float | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        `messages`: dicts with `role` and `content`: text, or parts `{"type": "text", "text": …}`, whose
        texts are joined by newlines; other types of parts are refused.
        `chat_template`: another template than the model's, or the name of one of several.
        `add_generation_prompt`: end the prompt with the header of an answer.
        `continue_final_message`: go on with the last message instead; needs `add_generation_prompt=False`.
        `tools`: JSON schemas or functions, for the template alone; refused if it has no place for them.
        `chat_template_kwargs`: further variables of the template, e.g. `{"enable_thinking": False}`; names
        that it does not read are refused.
        `cache_salt`: cached prefixes are shared among requests of one salt; one for all, or one each.
        The other arguments are those of `generate`.

        Raises RequestError also for what the template itself refuses, with its words.
        """
        flag("use_tqdm", use_tqdm)
        prompts = self._chats.read_all(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            cache_salt=cache_salt,
        )
        params = each_params(sampling_params, len(prompts))
        services = Service.each(len(prompts), priority, tenant, timeout_s)
        return run_all(self.session(), prompts, params, services, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout_s: float | Sequence[float | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `beam_width` best texts for every prompt, best first, as `outputs` with their `score`.

        Beams share the KV of the text they have in common. Results are those of transformers'
        `generate(num_beams=…)`. The other arguments are those of `generate`.
        """
        flag("use_tqdm", use_tqdm)
        tokenized = self._prompts.read_all(prompts)
        searches = each_params(params, len(tokenized), BeamSearchParams)
        services = Service.each(len(tokenized), priority, tenant, timeout_s)
        return run_all(self.session(), tokenized, searches, services, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        timeout_s: float | None = None,
        **template: Any,
    ) -> OutputStream:
        """Iterate over the request as it stands after each of its tokens, the last time finished.

        `prompt`: a prompt, or a conversation; then `template` are those arguments of `chat` that its template
        gets. `SamplingParams.output_kind="delta"`: each output holds what is new.

        The request is accepted (or refused with RequestError or QueueFull) at once; leaving or closing
        the stream early aborts it. Tokens are computed whether they are read or not. The other arguments
        are those of `generate`.
        """
        tokenized = self.read_prompt(prompt, **template)
        params = each_params(sampling_params, 1)
        service = Service(priority, tenant, timeout_s)
        return OutputStream(self.session(), tokenized, params[0], service, self)

    def abort(self, request_id: str) -> bool:
        """End a request now: its KV memory is free, and whoever waits for it gets what it has.

        That output has `finish_reason="abort"`. From any thread. False: no such request is running.
        """
        return self.loop.abort(text("request_id", request_id))

    def read_prompt(self, prompt: Prompt | Sequence[Message], **template: Any) -> TokenizedPrompt:
        """One prompt or conversation as token ids; `template`: arguments of `chat`, of a conversation.

        Raises RequestError or CapacityError if it is refused.
        """
        if is_conversation(prompt):
            [read] = self._chats.read_all(prompt, **template)
            return read
        if template:
            raise RequestError(f"{', '.join(template)}: these are for conversations, and this is a prompt")
        return self._prompts.read(prompt)

    def session(self) -> Session:
        """Several requests of one client, added and awaited as it likes."""
        return Session(self.loop, self.engine.intake.vocabulary)

    # ------------------------------------------------------------------ look
    def memory_usage(self) -> MemoryUsage:
        """What the KV cache holds right now, in bytes."""
        return self.loop.look(self.engine.kv.usage)

    def metrics(self) -> EngineMetrics:
        """Counters since this engine started; a copy."""
        return self.loop.look(lambda: replace(self.engine.metrics, kv_stats=self.engine.kv.stats()))

    def snapshot(self) -> dict[str, Any]:
        """Everything about this moment, ready for JSON (`vattn-snapshot-1`): memory, requests, rates, pages.

        The fields are those of `vattn.engine.snapshot.take_snapshot`.
        """
        from vattn.engine.snapshot import take_snapshot
        from vattn.models.describe import describe_model

        limits, ahead = self.scheduler_config, self.kv_config.background_mapping
        return self.loop.call(
            lambda: take_snapshot(
                self.engine,
                model=describe_model(self.loaded, self.max_model_len),
                limits={
                    "max_num_seqs": limits.max_num_seqs,
                    "max_num_batched_tokens": limits.max_num_batched_tokens,
                    "max_model_len": self.max_model_len,
                    "kv_memory_bytes": self.stack.kv_memory_bytes,
                    "swap_space_bytes": self.kv_config.swap_space_bytes,
                    "preemption": limits.preemption,
                    "prefix_caching": self.engine.kv.shares_prefixes,
                    "background_mapping": self.stack.device.type == "cuda" if ahead is None else ahead,
                },
                kv=self.describe_kv(),
            )
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; needed when the model's weights change in place."""
        self.loop.call(self.engine.reset_prefix_cache)

    # ------------------------------------------------------------------ memory comes and goes
    def resize_kv_cache(self, memory_bytes: int) -> None:
        """Give the KV cache another budget, also while requests run.

        Smaller: what is parked or cached gives way, then requests are preempted, within this call. Backends
        other than `virtual` move to new memory and for a moment hold both. Raises ConfigError, and changes
        nothing, when one request of `max_model_len` would not fit or the device has not so much.
        """
        memory_bytes = whole("memory_bytes of resize_kv_cache", memory_bytes, 1, LARGEST, error=ConfigError)
        self.loop.call(lambda: self.stack.resize(memory_bytes))

    def sleep(self) -> None:
        """Give all KV memory back to the device. Requests that run wait, and go on after `wake_up`."""
        self.loop.call(self.engine.sleep)

    def wake_up(self) -> None:
        """End `sleep`. Raises ConfigError if the memory is not there any more: the engine sleeps on.

        Then free memory on the device, or `resize_kv_cache` to less, and try again.
        """
        self.loop.call(self.stack.wake_up)

    def listen(self, listener: StepListener) -> Callable[[], None]:
        """Have `listener` look on from the next step, until what this returns is called."""
        listeners = self.engine.listeners
        self.loop.call(lambda: listeners.append(listener))
        return lambda: self.loop.call(lambda: listeners.remove(listener))

    @property
    def runner(self) -> Runner:
        """What runs the model in the engine's steps; for measurements between or around them."""
        executor = self.engine.executor
        assert isinstance(executor, TorchExecutor)
        return executor.runner

    def describe_kv(self) -> dict[str, str | int]:
        """How KV memory is laid out: layout, page or block size and their number; what it stores."""
        stored = {"kv_cache_dtype": str(self.kv_shape.dtype).removeprefix("torch.")}
        if self.kv_config.dtype != "auto":
            stored["kv_scales"] = "token" if self.kv_config.scales == "token" else "static"
        return {**self.engine.kv.describe(), **stored}

    def get_tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def check(self) -> None:
        """Raise AssertionError unless every book of scheduler and cache balances."""
        self.loop.look(self.engine.scheduler.check)

    # ------------------------------------------------------------------ end
    def close(self) -> None:
        """Abort what runs and give all KV memory back. Idempotent; after a DriverError, goes on where it was.

        A transformers model that was handed over gets its own attention back. An LLM that is dropped is
        closed.
        """
        self.stack.give_back()
        self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _one_of(config: C | None, options: C, defaults: C) -> C:
    """A whole configuration or single options, not both. Raises ConfigError."""
    if config is None:
        return options
    if not isinstance(config, type(options)):
        raise ConfigError(f"this must be a {type(options).__name__}, not {type(config).__name__}")
    if options != defaults:
        raise ConfigError(f"give a {type(options).__name__} or its single options, not both")
    return config
