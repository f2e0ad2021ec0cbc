"""Builds a request's output from the engine's reports and turns its tokens into text.

    EngineLoop ── RequestDelta ──> OutputCollector ──> RequestOutput      in the client's thread
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vattn.engine.deltas import Beam, BranchDelta, RequestDelta
from vattn.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from vattn.params import BeamSearchParams, RequestOutputKind, SamplingParams
from vattn.sampling.detokenize import Finish, IncrementalDetokenizer, TokenText


class _Branch:
    """One output so far, and how much of it the client has received."""

    def __init__(self, text: IncrementalDetokenizer, include_stop: bool) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish: Finish | None = None
        self._detokenizer = text
        self._include_stop = include_stop
        self.given = (0, 0)
        """Characters and tokens that the client has received as deltas."""

    def add(self, delta: BranchDelta) -> None:
        """Add what is new. Raises what the tokenizer raises; the output then has tokens but no text."""
        self.token_ids += delta.token_ids
        self.finish = delta.finish
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            self.cumulative_logprob += entry[token].logprob
        self.logprobs += delta.logprobs
        self.text += self._decode(delta) if delta.text is None else delta.text

    def _decode(self, delta: BranchDelta) -> str:
        shown = delta.token_ids
        if delta.finish is not None and delta.finish.reason == "stop" and not self._include_stop:
            shown = shown[:-1]  # leave out the text of the EOS or stop token
        for token in shown:
            self._detokenizer.append(token)
        if delta.finish is not None:
            self._detokenizer.close()
        return self._detokenizer.take()


class OutputCollector:
    """Collects the reports of one request. The cost of a report depends only on what is new in it.

    Without a `vocabulary` (None) outputs have no text.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        vocabulary: TokenText | None,
    ) -> None:
        self.request_id = request_id
        self.finished = False
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._vocabulary = vocabulary
        self._beams: list[Beam] = []
        self._error: str | None = None
        self._metrics = RequestMetrics(0.0)
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._params = SamplingParams() if isinstance(params, BeamSearchParams) else params
        self._branches = [] if isinstance(params, BeamSearchParams) else self._new_branches(self._params)

    def _new_branches(self, params: SamplingParams) -> list[_Branch]:
        # The engine decodes outputs with stop strings, so they are not decoded again here.
        vocabulary = None if params.stop_strings else self._vocabulary
        plain = replace(params, stop=None)
        return [
            _Branch(
                IncrementalDetokenizer(vocabulary, plain, self._prompt_token_ids),
                params.include_stop_str_in_output,
            )
            for _ in range(params.branches)
        ]

    def add(self, delta: RequestDelta) -> bool:
        """Add a report. Returns False if its text can't be made; the output then ends with an error."""
        self._metrics = delta.metrics
        self._error = delta.error
        self.finished = delta.finished
        self._beams = delta.beams
        if delta.failure is not None:
            self._end("error")
        self._prompt_logprobs += [self._annotated(entry) for entry in delta.prompt_logprobs]
        try:
            for new in delta.branches:
                logprobs = [] if self._params.logprobs is None else map(self._annotate, new.logprobs)
                self._branches[new.branch].add(new._replace(logprobs=list(logprobs) or new.logprobs))
        except Exception as error:  # a tokenizer may raise anything
            self._error = (
                f"its text could not be made ({type(error).__name__}: {error}): try again; "
                "detokenize=False does without the tokenizer"
            )
            self._end("error")
            self.finished = True
            return False
        return True

    def _end(self, reason: FinishReason) -> None:
        for branch in self._branches:
            branch.finish = branch.finish or Finish(reason)

    def _annotate(self, entry: TokenLogprobs) -> TokenLogprobs:
        return entry if self._vocabulary is None else self._vocabulary.annotate(entry)

    def _annotated(self, entry: TokenLogprobs | None) -> TokenLogprobs | None:
        return None if entry is None else self._annotate(entry)

    # ------------------------------------------------------------------ what users see
    def output(self) -> RequestOutput:
        """The output so far, or with `output_kind="delta"`, what is new since the last call."""
        prompt_logprobs = None
        if self._params.prompt_logprobs is not None:
            prompt_logprobs = list(self._prompt_logprobs) or [None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=self._beam_outputs() if not self._branches else self._outputs(),
            finished=self.finished,
            metrics=self._metrics,
            prompt_logprobs=prompt_logprobs,
            error=self._error,
        )

    def _outputs(self) -> list[CompletionOutput]:
        branches = self._branches
        if len(branches) > self._params.n:  # best_of: keep the most likely ones
            branches = sorted(branches, key=lambda b: -b.cumulative_logprob)[: self._params.n]
        return [self._completion(index, branch) for index, branch in enumerate(branches)]

    def _completion(self, index: int, branch: _Branch) -> CompletionOutput:
        characters = tokens = 0
        if self._params.output_kind is RequestOutputKind.DELTA:
            characters, tokens = branch.given
            branch.given = len(branch.text), len(branch.token_ids)
        asked = self._params.logprobs is not None
        finish = branch.finish
        return CompletionOutput(
            index=index,
            text=branch.text[characters:],
            token_ids=branch.token_ids[tokens:],
            cumulative_logprob=branch.cumulative_logprob if asked else None,
            logprobs=branch.logprobs[tokens:] if asked else None,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
        )

    def _beam_outputs(self) -> list[CompletionOutput]:
        return [
            CompletionOutput(
                index=index,
                text=self._text(beam.token_ids),
                token_ids=beam.token_ids,
                cumulative_logprob=beam.cumulative_logprob,
                finish_reason=beam.finish.reason,
                score=beam.score,
            )
            for index, beam in enumerate(self._beams)
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._vocabulary is None:
            return ""
        try:
            return self._vocabulary.text(token_ids)
        except Exception as error:
            self._error = f"the text of a beam could not be made ({type(error).__name__}: {error})"
            return ""
