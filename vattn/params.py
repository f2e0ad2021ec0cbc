"""Sampling parameters of one request, with vLLM's names, defaults and checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from vattn.checks import flag, number, shown, texts, token_ids, whole
from vattn.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling (vLLM's `_SAMPLING_EPS`)."""

LARGEST_BIAS = 1e30
"""A larger value would overflow float32 logits, and all tokens would look alike."""

WHOLE_VOCABULARY = -1
"""`logprobs` / `prompt_logprobs`: this value asks for every token."""


MOST_OUTPUTS = 16_384
"""Maximum number of outputs for one prompt (vLLM's limit)."""


class RequestOutputKind(StrEnum):
    """What the items of a stream hold."""

    CUMULATIVE = "cumulative"
    """Everything so far."""
    DELTA = "delta"
    """Only what is new since the last output."""
    FINAL_ONLY = "final_only"
    """Everything, in a single output at the end."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Immutable: one object may serve many requests at once.

    Values are checked when the object is made; token ids are checked against the model's vocabulary by
    `verify`, when the request is added. Both raise `RequestError` with the value and what is allowed.
    Use `dataclasses.replace(params, temperature=0)` to derive another.

    `vattn.sampling.sampler` documents the order in which they act on a row of logits.
    """

    n: int = 1
    """Outputs to return for the prompt, 1 to 16,384. The prompt is computed once; its KV is shared."""
    best_of: int | None = None
    """Outputs to generate, at least n; the n with the highest cumulative log-probability are returned, best
    first. None = n."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output. In [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output. Above 0; 1 = off."""
    temperature: float = 1.0
    """Divides the logits. At least 0; below 1e-5 the most likely token is taken and top_k, top_p, min_p
    and seed have no effect."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that holds this probability. In (0, 1]; 1 = all."""
    top_k: int = 0
    """Keep this many most likely tokens. 0 or -1 = all."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most likely one. In [0, 1]; 0 = all."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever else runs. In [-2**63, 2**64);
    None or -1 = the engine draws one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output. They are left out of the text unless `include_stop_str_in_output` is set.
    They may name special tokens, even with `skip_special_tokens`."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output, as EOS does."""
    bad_words: Sequence[str] | None = None
    """Words that are never generated. A word's last token is banned where it would complete the word."""
    ignore_eos: bool = False
    """Continue after EOS."""
    max_tokens: int | None = 16
    """Maximum number of output tokens, at least 1. None = as many as the model's length allows."""
    min_tokens: int = 0
    """Before this many output tokens, EOS and `stop_token_ids` can't be sampled, and stop strings don't end
    the output."""
    logprobs: int | None = None
    """For each output token, return this many most likely tokens with their log-probabilities, and the
    sampled one. -1 = the whole vocabulary. They come from the model's own logits, before any parameter
    acts."""
    prompt_logprobs: int | None = None
    """The same for each prompt token except the first."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers added to the logits of these token ids. They must be finite."""
    detokenize: bool = True
    """False: return only token ids; the text stays empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """False: the decoder's spaces between neighbouring added tokens are left out (when they are shown)."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What `stream` yields. `generate` always returns the whole output."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", whole("n", self.n, 1, MOST_OUTPUTS))
        if self.best_of is not None:
            put("best_of", whole("best_of", self.best_of, self.n, MOST_OUTPUTS, hint=f" (n={self.n})"))
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("temperature", 0.0, math.inf),
            ("min_p", 0.0, 1.0),
        ):
            put(name, number(name, getattr(self, name), low, high))
        for name, high in (("repetition_penalty", math.inf), ("top_p", 1.0)):
            put(name, number(name, getattr(self, name), 0.0, high, above=True))
        put("top_k", max(whole("top_k", self.top_k, -1, hint=" (0 or -1 = all tokens)"), 0))
        if self.seed is not None:
            seed = whole("seed", self.seed, -(2**63), 2**64 - 1)
            put("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            hint = " (None = up to the model's length)"
            put("max_tokens", whole("max_tokens", self.max_tokens, 1, hint=hint))
        put("min_tokens", whole("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                hint = " (-1 = the whole vocabulary)"
                put(name, whole(name, getattr(self, name), WHOLE_VOCABULARY, hint=hint))
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            flag(name, getattr(self, name))

        if not isinstance(self.output_kind, str) or self.output_kind not in list(RequestOutputKind):
            known = ", ".join(repr(str(kind)) for kind in RequestOutputKind)
            raise RequestError(f"output_kind must be one of {known}, got {shown(self.output_kind)}")
        put("output_kind", RequestOutputKind(self.output_kind))
        if self.branches > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise RequestError("best_of chooses at the end: output_kind='delta' needs best_of == n")

        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", texts("stop", stop))
        put("bad_words", texts("bad_words", self.bad_words))
        put("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize=True, or use stop_token_ids")

    @property
    def branches(self) -> int:
        """Number of outputs that are generated for the prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def penalised(self) -> bool:
        """True if a penalty makes logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def verify(self, vocab_size: int, bad_words_token_ids: Iterable[Sequence[int]] = ()) -> None:
        """Check token ids and counts against the model's vocabulary.

        `bad_words_token_ids` are the tokens of `bad_words`, from the model's own tokenizer.
        Raises `RequestError`.
        """
        bad_words = [tuple(word) for word in bad_words_token_ids]
        if () in bad_words:
            raise RequestError("bad_words holds a word that the tokenizer turns into no tokens at all")
        for name, ids in (
            ("stop_token_ids", self.stop_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
            ("bad_words", tuple(token for word in bad_words for token in word)),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                token = next(token for token in ids if not 0 <= token < vocab_size)
                raise RequestError(
                    f"{name} holds token id {shown(token)}; the model's vocabulary is 0 … {vocab_size - 1:,}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise RequestError(
                    f"{name}={count:,} is more than the vocabulary's {vocab_size:,} tokens (-1 = all of them)"
                )


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search. Results equal those of transformers' `generate(num_beams=…)`.

    Raises `RequestError` for values that are not allowed.
    """

    beam_width: int = 0
    """Number of beams kept in every step and of outputs returned, at least 1. There is no default."""
    max_tokens: int = 16
    """Maximum number of output tokens, at least 1."""
    length_penalty: float = 1.0
    """An output's score is its log-probability / length ** this. Above 0 favours long outputs."""
    early_stopping: bool | Literal["never"] = False
    """When to stop, once `beam_width` outputs have ended. True: at once. False: when the best running beam,
    at its present length, can't beat the worst of them. "never": when it can't beat it at any length."""
    temperature: float = 0.0
    """Divides the logits before probabilities are taken; 0 = 1, the model's own."""
    ignore_eos: bool = False
    """Continue after EOS."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        hint = " (the number of texts kept at every step)"
        put("beam_width", whole("beam_width", self.beam_width, 1, hint=hint))
        put("max_tokens", whole("max_tokens", self.max_tokens, 1))
        put("length_penalty", number("length_penalty", self.length_penalty, -math.inf, math.inf))
        put("temperature", number("temperature", self.temperature, 0.0, math.inf))
        never = isinstance(self.early_stopping, str) and self.early_stopping == "never"
        if not never and not isinstance(self.early_stopping, bool):
            raise RequestError(
                f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}"
            )
        flag("ignore_eos", self.ignore_eos)


def each_params(
    params: Any,
    count: int,
    kind: type[SamplingParams] | type[BeamSearchParams] = SamplingParams,
    *,
    default: SamplingParams | None = None,
) -> list[Any]:
    """A list with the parameters of each of `count` prompts. `params` is one object for all, a list with one
    each, or None for `default`.

    Raises RequestError for objects of another kind, or for a list of another length.
    """
    if params is None and kind is SamplingParams:
        params = default or SamplingParams()
    if isinstance(params, kind):
        return [params] * count
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise RequestError(f"sampling parameters are {kind.__name__}, not {shown(params)}")
    for item in params:
        if not isinstance(item, kind):
            raise RequestError(f"sampling parameters are {kind.__name__}, not {shown(item)}")
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters")
    return list(params)


def _bias(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(values)}")
    bias = {}
    for token, value in values.items():
        token = whole("a token id in logit_bias", token, 0)
        bias[token] = number(f"logit_bias[{token}]", value, -LARGEST_BIAS, LARGEST_BIAS)
    return bias
