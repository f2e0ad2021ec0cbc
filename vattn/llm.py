"""`LLM`: generate from Python. One argument chooses the KV backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
    one_of,
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
from vattn.models.generation import default_sampling
from vattn.models.loader import LoadedModel, load_model
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, SamplingParams, each_params
from vattn.prompts import Prompt, PromptReader, TokenizedPrompt
from vattn.session import OutputStream, Session, run_all
from vattn.vmm.driver import Driver


class LLM:
    """A model and its KV cache, ready to generate.

    Args:
        model: `"smollm2"` (the demo model), a Hugging Face hub id, a folder, a `.gguf` file, a
            transformers model in memory (it serves this engine alone until `close`), or a `LoadedModel`
            (weights may be shared by several engines, also those of `load_model(a model in memory)`).
        tokenizer: use this tokenizer instead of the model's own, or if the model has none: a name, a folder,
            a transformers tokenizer or a `tokenizers.Tokenizer`.
        kv_config, scheduler_config: a whole `KVCacheConfig` or `SchedulerConfig`, instead of the single
            options below that it covers.
        kv_backend: how the KV cache is managed: `"virtual"`, `"paged"` or `"static"`.
        kv_layout: `"interleaved"`, `"per_layer"` or `"auto"`; only for `virtual` and `static`.
        page_bytes: physical page size of `virtual`, a multiple of the driver's granularity.
        block_size: tokens per block of `paged`, and the unit in which prefixes are compared.
        enable_prefix_caching: keep computed KV for later requests with the same prefix. Cached KV is evicted
            before any request is preempted. Default: on, if the backend supports it (`static` does not).
        preemption: what happens to the KV of a preempted request: `"recompute"`, `"swap"` (copied to host
            memory) or `"auto"`, whichever is predicted to cost less.
        swap_space_bytes: host memory for swapped KV. Default: 4 GiB; none with `"recompute"`.
        kv_cache_dtype: `"auto"` (the model's), or `"int8"` or `"fp8_e4m3"`, which take one byte per number.
        kv_scales: scales of a quantised cache: `"token"`, one per token and head, or static ones per head
            from `vattn.lab.quality.calibrate`, as a file, a mapping or `KVRanges`.
        attention: the attention kernel: `"triton"`, `"sdpa"`, `"flex"` or `"flash_attn"` for contiguous
            memory; `"triton"`, `"gather"` or `"flex"` for paged. `"auto"`: Triton on CUDA, SDPA on CPU.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"`.
        dtype: `"auto"` (float32 on CPU, the checkpoint's on CUDA), a name or a `torch.dtype`.
        max_model_len: longest request in tokens, prompt and output. Default: the model's (with its
            rotary scaling: docs/models.md), or what the cache holds.
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum number of tokens in one step. Longer prompts are prefilled in chunks.
        scheduling_policy: the order of requests: `"fcfs"` (first come, first served) or `"priority"`
            (smaller first).
        priority_ageing_tokens: a waiting request gains one unit of priority each time the engine has
            scheduled this many tokens, so that no request waits forever.
        fair_shares: weights of tenants, e.g. `{"a": 2.0}`; a tenant that is not named has weight 1. Tenants
            with requests share tokens and memory by weight, however many requests each one sends.
        max_waiting: maximum number of waiting requests per tenant. Further ones get `QueueFull`. Default: no
            limit.
        trace: file in which every decision of the scheduler is logged, as JSON lines (`vattn replay`). It
            holds the token ids of prompts and outputs.
        kv_cache_memory_bytes: budget of KV memory. Default: `gpu_memory_utilization` of the device's memory,
            minus weights; on CPU 4 GiB, or that share of free memory if it is less.
        background_mapping: map pages ahead in a thread. Default: only on CUDA.
        overlap: launch each step before the host knows the tokens of the step before. Default: only on CUDA.
        enforce_eager: True: never decode from captured graphs. False: decode padded as for a graph, even
            where nothing can be captured. Default: graphs on CUDA with `"triton"` attention.
        driver: virtual memory driver to use; the caller must close it. Default: the device's own.
        coordinator: file through which engines share a device's memory (`vattn top`, `vattn limit`), or
            `"default"` for this user's own file. Default: none, at no cost.
        engine_name: the engine's name in that file. Default: the model's name.
        seed: root of the seeds of requests that have none.
        generation_config: defaults of sampling_params: `"auto"` (the model's), `"vllm"` (none), or a folder.

    Raises `ConfigError`, `ModelNotFound`, `UnsupportedModel` or `DriverUnavailable`, and then leaves nothing
    allocated. Several threads may call its methods; their requests share the batch.
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
        generation_config: str | Path = "auto",
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
        self.kv_config = one_of(
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
        self.scheduler_config = one_of(
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
        self._sampling = default_sampling(generation_config, self.loaded.generation_config)
        self.kv_shape = self.kv_config.shape(spec)
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
        # Free everything when this object is garbage collected, or when the interpreter exits.
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
        """Complete every prompt. Outputs are in the order of the prompts.

        `prompts`: text, token ids, a dict (`{"prompt": …}` or `{"prompt_token_ids": …}`), or a list of
        these. `sampling_params`, `priority`, `tenant`, `timeout_s`: one value for all, or a list of one each.
        `priority`: smaller is more urgent; used only with the priority policy. `tenant`: the tenant that the
        requests belong to. `timeout_s`: seconds after which a request ends with its output so far and
        `finish_reason="timeout"`. `use_tqdm`: show a progress bar.

        Raises RequestError if any prompt or parameter is refused, and QueueFull if more requests would wait
        than `max_waiting` allows. No request is started then.
        """
        flag("use_tqdm", use_tqdm)
        tokenized = self._prompts.read_all(prompts)
        params = each_params(sampling_params, len(tokenized), default=self._sampling)
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
        `tools`: JSON schemas or functions. Only the template uses them; refused if it does not.
        `chat_template_kwargs`: further variables of the template, e.g. `{"enable_thinking": False}`; names
        that it does not read are refused.
        `cache_salt`: only requests with the same salt share cached prefixes; one for all, or one each.
        The other arguments are those of `generate`.

        Also raises RequestError, with the template's own message, if the template refuses a conversation.
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
        params = each_params(sampling_params, len(prompts), default=self._sampling)
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
        """Search for the `beam_width` best outputs of every prompt. They come best first, with a `score`.

        Beams share the KV of the tokens they have in common. Results equal those of transformers'
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
        """Iterate over a request's outputs, one after each token. The last output is finished.

        `prompt` is a prompt or a conversation. For a conversation, `template` holds the arguments of `chat`
        that concern its chat template. With `SamplingParams.output_kind="delta"`, each output holds only what
        is new.

        The call itself accepts the request, or refuses it with RequestError or QueueFull. Leaving or closing
        the stream early aborts the request. The engine computes tokens whether they are read or not. The
        other arguments are those of `generate`.
        """
        tokenized = self.read_prompt(prompt, **template)
        params = each_params(sampling_params, 1, default=self._sampling)
        service = Service(priority, tenant, timeout_s)
        return OutputStream(self.session(), tokenized, params[0], service, self)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its KV memory. The client that waits for it gets the output so far.

        That output has `finish_reason="abort"`. May be called from any thread. Returns False if no such
        request is running.
        """
        return self.loop.abort(text("request_id", request_id))

    def read_prompt(self, prompt: Prompt | Sequence[Message], **template: Any) -> TokenizedPrompt:
        """Read one prompt or conversation and return its token ids.

        For a conversation, `template` holds the arguments of `chat` that concern its chat template.
        Raises RequestError or CapacityError if it is refused.
        """
        if is_conversation(prompt):
            [read] = self._chats.read_all(prompt, **template)
            return read
        if template:
            raise RequestError(f"{', '.join(template)}: these are for conversations, and this is a prompt")
        return self._prompts.read(prompt)

    def session(self) -> Session:
        """A session for a client that adds several requests and waits for their outputs in any order."""
        return Session(self.loop, self.engine.intake.vocabulary)

    # ------------------------------------------------------------------ look
    def memory_usage(self) -> MemoryUsage:
        """The memory that the KV cache holds now, in bytes."""
        return self.loop.look(self.engine.kv.usage)

    def metrics(self) -> EngineMetrics:
        """A copy of the counters since this engine started."""
        return self.loop.look(lambda: replace(self.engine.metrics, kv_stats=self.engine.kv.stats()))

    def snapshot(self) -> dict[str, Any]:
        """Describe the engine now, ready for JSON (`vattn-snapshot-1`): memory, requests, rates, pages.

        `vattn.engine.snapshot.take_snapshot` documents the fields.
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
        """Forget all cached prefixes. Needed when the model's weights were changed in place."""
        self.loop.call(self.engine.reset_prefix_cache)

    # ------------------------------------------------------------------ memory comes and goes
    def resize_kv_cache(self, memory_bytes: int) -> None:
        """Give the KV cache another budget, even while requests run.

        To shrink, this call first frees parked and cached memory, then preempts requests. Backends other than
        `virtual` move to new memory and hold both for a moment. Raises ConfigError, and changes nothing, if
        one request of `max_model_len` tokens would not fit, or if the device lacks the memory.
        """
        memory_bytes = whole("memory_bytes of resize_kv_cache", memory_bytes, 1, LARGEST, error=ConfigError)
        self.loop.call(lambda: self.stack.resize(memory_bytes))

    def sleep(self) -> None:
        """Give all KV memory back to the device. Running requests wait until `wake_up`, then go on."""
        self.loop.call(self.engine.sleep)

    def wake_up(self) -> None:
        """End `sleep`. Raises ConfigError, and the engine stays asleep, if the memory is no longer available.

        In that case, free memory on the device, or call `resize_kv_cache` with less, and try again.
        """
        self.loop.call(self.stack.wake_up)

    def listen(self, listener: StepListener) -> Callable[[], None]:
        """Call `listener` from the next step on. Returns a function that ends this."""
        listeners = self.engine.listeners
        self.loop.call(lambda: listeners.append(listener))
        return lambda: self.loop.call(lambda: listeners.remove(listener))

    @property
    def runner(self) -> Runner:
        """The object that runs the model in the engine's steps, for measurements between or around steps."""
        executor = self.engine.executor
        assert isinstance(executor, TorchExecutor)
        return executor.runner

    def describe_kv(self) -> dict[str, str | int]:
        """Describe the KV memory: its layout, page or block size, number of pages or blocks, and dtype."""
        stored = {"kv_cache_dtype": str(self.kv_shape.dtype).removeprefix("torch.")}
        if self.kv_config.dtype != "auto":
            stored["kv_scales"] = "token" if self.kv_config.scales == "token" else "static"
        return {**self.engine.kv.describe(), **stored}

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without `sampling_params` use: `generation_config`, read as docs/models.md says."""
        return self._sampling

    def get_tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def check(self) -> None:
        """Raise AssertionError unless the records of the scheduler and the cache agree."""
        self.loop.look(self.engine.scheduler.check)

    # ------------------------------------------------------------------ end
    def close(self) -> None:
        """Abort all requests and free all KV memory. Idempotent. After a DriverError, another call continues.

        A transformers model that was passed in gets its own attention back. An LLM that is garbage collected
        is closed.
        """
        self.stack.give_back()
        self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
