"""What a quantised KV cache changes, against the same model with its KV as it is.

Engines stand side by side, one per way of storing KV, with the same weights. Each is driven through a text
in chunks (teacher-forced: the text's tokens, whatever the model would have said), so every logit comes from
keys and values that were stored and read back:

    text      | chunk 0 | chunk 1 | chunk 2 |
    float       logits    logits    logits          KL, argmax and likelihood, position by position
    int8        logits    logits    logits
    …
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.engine.packing import PackedBatch
from vattn.errors import CapacityError
from vattn.kv.base import Chunk
from vattn.llm import LLM
from vattn.params import SamplingParams

CHUNK = 64
"""Tokens of a step: most keys a token attends to were stored by earlier ones."""


@dataclass(frozen=True)
class Quality:
    """Figures of one way of storing KV. KL in nats, of the float model's distribution to this one's."""

    kv_cache_dtype: str
    kv_scales: str | None
    token_bytes: int
    bytes_vs_bf16: float
    """token_bytes over those of the same cache in bfloat16."""
    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    agreement: float
    """Share of positions whose most likely next token is the float model's."""
    perplexity: float
    perplexity_change: float
    """Relative to the float model's: 0.01 is one per cent worse."""
    perplexity_change_error: float
    """Standard error of that change, from position to position: a change below it says nothing."""
    divergence: list[int | None]
    """Free greedy generation: the first output token that differs, per prompt; None: none did."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Positions:
    """What is collected position by position, for one engine."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.agree: list[Tensor] = []
        self.nll: list[Tensor] = []

    def add(self, reference: Tensor, logprobs: Tensor, targets: Tensor) -> None:
        """Log-probabilities `[n, V]`; `targets` `[<= n]` are the tokens that follow."""
        kl = (reference.exp() * (reference - logprobs)).sum(-1)
        self.kl.append(kl.clamp_(min=0).cpu())
        self.agree.append((reference.argmax(-1) == logprobs.argmax(-1)).cpu())
        self.nll.append(-logprobs[: len(targets)].gather(1, targets.unsqueeze(1)).squeeze(1).cpu())


@torch.inference_mode()
def forced_logits(llm: LLM, token_ids: Sequence[int], chunk: int = CHUNK) -> Generator[Tensor, None, None]:
    """Logits `[n, vocab]` of chunk after chunk of `token_ids`, through the engine's cache and kernels.

    Nobody else may use the engine meanwhile. Raises CapacityError if its cache can't hold them.
    """
    kv, runner = llm.engine.kv, llm.runner
    request_id = "forced"
    if kv.attach(request_id, token_ids) is None:
        raise CapacityError(
            f"the KV cache has no room for {len(token_ids):,} tokens: raise kv_cache_memory_bytes"
        )
    try:
        for start in range(0, len(token_ids), chunk):
            ids = list(token_ids[start : start + chunk])
            inputs = kv.begin_step([Chunk(request_id, start, len(ids))])
            positions = list(range(start, start + len(ids)))
            packed = PackedBatch(ids, [], positions, list(range(len(ids))), [], [])
            yield runner.run(packed, inputs, None)
            kv.submitted(runner.record_event())
    finally:
        kv.free(request_id)


def measure(
    reference: LLM,
    engines: Sequence[LLM],
    texts: Sequence[list[int]],
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 64,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Quality]:
    """Figures of `reference` (against itself) and then of each engine.

    texts: token ids to force; prompts: token ids to continue greedily by `max_tokens` tokens. `progress`
    is called with the number of tokens just run through one engine.
    """
    everyone = [reference, *engines]
    collected = [_Positions() for _ in everyone]
    for ids in texts:
        follow = torch.tensor(ids[1:], device=reference.runner.device)
        with ExitStack() as stack:
            steps = [stack.enter_context(closing(forced_logits(llm, ids, chunk))) for llm in everyone]
            for first, logits in zip(range(0, len(ids), chunk), zip(*steps, strict=True), strict=True):
                _compare(collected, logits, follow[first : first + chunk])
                progress(len(everyone) * len(logits[0]))
    answers = []
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for llm in everyone:
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        answers.append([o.outputs[0].token_ids for o in outputs])
        progress(max_tokens * len(prompts))
    base = collected[0]
    return [
        _summary(llm, positions, base, [first_difference(a, b) for a, b in zip(answers[0], own, strict=True)])
        for llm, positions, own in zip(everyone, collected, answers, strict=True)
    ]


def _compare(collected: Sequence[_Positions], logits: Sequence[Tensor], targets: Tensor) -> None:
    """Enter one chunk's logits of all engines, the reference first."""
    expected: Tensor | None = None
    for positions, rows in zip(collected, logits, strict=True):
        logprobs = rows.float().log_softmax(-1)
        expected = logprobs if expected is None else expected
        positions.add(expected, logprobs, targets)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ; None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def _summary(llm: LLM, positions: _Positions, base: _Positions, divergence: list[int | None]) -> Quality:
    kl, shape = torch.cat(positions.kl), llm.kv_shape
    worse = (torch.cat(positions.nll) - torch.cat(base.nll)).double()
    change = math.expm1(worse.mean().item())
    error = worse.std().item() / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    return Quality(
        kv_cache_dtype=str(shape.dtype).removeprefix("torch."),
        kv_scales={0: "static", 4: "token"}[shape.scale_bytes] if shape.quantised else None,
        token_bytes=shape.token_bytes,
        bytes_vs_bf16=shape.token_bytes / (4 * shape.num_layers * shape.head_elems),
        positions=len(kl),
        kl_mean=kl.double().mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        agreement=torch.cat(positions.agree).float().mean().item(),
        perplexity=math.exp(torch.cat(positions.nll).double().mean().item()),
        perplexity_change=change,
        perplexity_change_error=(1 + change) * error,
        divergence=divergence,
    )
