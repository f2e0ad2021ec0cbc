"""Checks what a user asks for and makes the requests that the scheduler works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vattn.engine.groups import BeamGroup, ParallelGroup
from vattn.engine.request import Request
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.errors import CapacityError, RequestError
from vattn.outputs import RequestMetrics
from vattn.params import BeamSearchParams, SamplingParams
from vattn.sampling.beam import BeamSearch
from vattn.sampling.detokenize import IncrementalDetokenizer, StopChecker, TokenText
from vattn.sampling.sampling_state import SamplingStates


class Intake:
    """Makes the requests of one engine.

    Args:
        vocab_size: number of tokens in the model's vocabulary.
        vocabulary: turns tokens into text; None if there is no tokenizer.
        eos_token_ids: tokens that end an output.
        shares_prefixes: whether requests with the same salt may share cached prefixes.
        adapters: returns the names of the active adapters. Requests never share KV across adapters.
        seed: root of the seeds of requests that have none.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        vocabulary: TokenText | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        shares_prefixes: bool = False,
        adapters: Callable[[], str] = str,
        seed: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._states = SamplingStates(seed=seed, eos_token_ids=eos_token_ids)
        self._shares = shares_prefixes
        self._adapters = adapters
        self._arrivals = 0

    # ------------------------------------------------------------------ checks
    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams | BeamSearchParams) -> None:
        """Raise RequestError or CapacityError if the engine can't serve this request.

        Token ids are not checked here: `PromptReader` has checked each against the vocabulary.
        """
        length = len(prompt_token_ids)
        if not length:
            raise RequestError("the prompt is empty: it needs at least one token")
        if length >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {length:,} tokens; with at least one output token it must fit "
                f"max_model_len={self.max_model_len:,}"
            )
        vocab_size = self._vocab_size
        if isinstance(params, SamplingParams):
            if self.vocabulary is None and (params.stop_strings or params.bad_words):
                raise RequestError("stop strings and bad_words need a tokenizer; the model came without one")
            params.verify(vocab_size, self._bad_words(params))
        elif params.beam_width > vocab_size:
            raise RequestError(
                f"beam_width={params.beam_width} is more than the vocabulary's {vocab_size} tokens"
            )

    # ------------------------------------------------------------------ requests
    def request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        stream: bool = False,
        service: Service = DEFAULT_SERVICE,
        cache_salt: str = "",
        branch: int = 0,
    ) -> Request:
        """Make one request without queueing it. `branch` is its index among the samples of the prompt."""
        max_tokens = self._max_tokens(prompt_token_ids, params.max_tokens)
        outputs: list[int] = []
        self._arrivals += 1
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            output_token_ids=outputs,
            params=params,
            sampling=self._states.new_state(
                params, prompt_token_ids, outputs, bad_words=self._bad_words(params), branch=branch
            ),
            stop=StopChecker(
                params,
                # Only stop strings need text here. All other text is made outside the step.
                IncrementalDetokenizer(
                    self.vocabulary if params.stop_strings else None, params, prompt_token_ids
                ),
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
            ),
            arrival=self._arrivals - 1,
            max_tokens=max_tokens,
            metrics=RequestMetrics(arrival_time, num_prompt_tokens=len(prompt_token_ids)),
            stream=stream,
            service=service,
            salt=self._salt(params, cache_salt),
        )

    def parallel(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **options: Any
    ) -> ParallelGroup:
        """Make the branches of a request with `n` (or `best_of`) outputs."""
        inner = params
        if params.branches > params.n and params.logprobs is None:
            inner = replace(params, logprobs=0)  # needed to rank the outputs
        leader = self.request(request_id, prompt_token_ids, inner, **options)
        branches = [leader]
        # One seed for all: the branch number makes their random numbers independent.
        same = replace(inner, seed=leader.sampling.seed, prompt_logprobs=None)
        for k in range(1, params.branches):
            name = f"{request_id}#{k}"
            branches.append(self.request(name, prompt_token_ids, same, branch=k, **options))
        group = ParallelGroup(branches)
        for branch in branches:
            branch.group = group
        return group

    def beams(
        self, request_id: str, prompt_token_ids: list[int], params: BeamSearchParams, **options: Any
    ) -> BeamGroup:
        """Make the requests of a beam search. They take as many places as `beam_width` requests."""
        length = self._max_tokens(prompt_token_ids, params.max_tokens)
        # One token more than the search needs, so that the search decides when a beam ends.
        inner = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
        leader = self.request(request_id, prompt_token_ids, inner, **options)
        leader.max_tokens = length + 1
        self._arrivals += params.beam_width - 1
        search = BeamSearch(params, length, self._eos_token_ids)
        leader.group = group = BeamGroup(search, leader)
        return group

    def heir(self, parent: Request, leader: Request, place: int, token: int, number: int) -> Request:
        """Make a beam with its parent's tokens and one more, at place `place` of its leader's group.

        `number` counts the heirs of the search, so that no request id is used twice.
        """
        outputs = [*parent.output_token_ids, token]
        params, prompt = parent.params, parent.prompt_token_ids
        heir = Request(
            request_id=f"{leader.request_id}#{number}",
            prompt_token_ids=prompt,
            output_token_ids=outputs,
            params=params,
            sampling=self._states.new_state(params, prompt, outputs),
            stop=StopChecker(params, IncrementalDetokenizer(None, params), max_tokens=parent.max_tokens),
            arrival=leader.arrival + place,
            max_tokens=parent.max_tokens,
            metrics=replace(parent.metrics),
            service=parent.service,
            salt=parent.salt,
        )
        heir.rank = (leader.rank[0], heir.arrival)
        return heir

    def _max_tokens(self, prompt_token_ids: Sequence[int], asked: int | None) -> int:
        room = self.max_model_len - len(prompt_token_ids)
        return room if asked is None else min(asked, room)

    def _salt(self, params: SamplingParams, cache_salt: str) -> str | None:
        """The key within which this request shares cached prefixes; None if it shares none."""
        if not self._shares or params.prompt_logprobs is not None:  # every prompt token must be computed
            return None
        return f"{self._adapters()}\0{cache_salt}"

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        return self.vocabulary.bad_words(params.bad_words or ()) if self.vocabulary else []
