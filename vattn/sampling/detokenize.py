"""Turns tokens into text, one token at a time, and decides when an output ends.

    token ──> TokenDecoder ──> IncrementalDetokenizer ──> visible text
              whole characters    stop strings, hold-back
        StopChecker: EOS, stop tokens, lengths; drives the two for one output

A token's text depends on its neighbours: a character may be split over several tokens, and a word's leading
space may vanish at the start. So the decoder decodes a short window twice, with and without the new token.
The difference is the token's text. HF's text-generation-inference and vLLM do the same.

    tokens   . . . . | shown before | new |
                     |<- window ---------->|     text[shown:] is new, unless it ends inside a character
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vattn.outputs import FinishReason, TokenLogprobs
from vattn.params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Number of last prompt tokens that are decoded together with the first output token."""
_PATIENCE = 8
"""Number of tokens to wait for the rest of a character. At most three are needed in valid UTF-8."""
_FIRST_MARK = 0xD800
"""Marks are halves of surrogate pairs, because no decoder returns one."""


class TokenText:
    """The parts of a tokenizer that detokenizing needs, looked up once per model.

    `tokenizer` is a transformers tokenizer or a `tokenizers.Tokenizer`. Text is as `tokenizer.decode`
    gives it with `clean_up_tokenization_spaces=False`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # The Rust object behind a fast tokenizer, three times as quick for short windows.
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if hasattr(self._backend, "get_added_tokens_decoder"):
            added = self._backend.get_added_tokens_decoder()
            size = self._backend.get_vocab_size(with_added_tokens=True)
        else:
            added, size = tokenizer.added_tokens_decoder, len(tokenizer)
        self.added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        """Tokens added to the model's own vocabulary, special or not."""
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        """Tokens that `skip_special_tokens` hides."""
        self.size = max(size, max(self.added, default=0) + 1)
        """Ids from this one on have no text, because the model's vocabulary is padded."""
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of an output, without special tokens and tokens that have no text."""
        return self.decode([t for t in token_ids if t < self.size], skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        """The text of one token by itself."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id])
        return text

    def annotate(self, entries: TokenLogprobs) -> TokenLogprobs:
        """The same entries with `decoded_token` filled in."""
        return {token: entry._replace(decoded_token=self.token(token)) for token, entry in entries.items()}

    def bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences of words at the start and in the middle of a text (behind a space)."""
        sequences: list[list[int]] = []
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, " " + bare):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                ids = list(getattr(ids, "ids", ids))
                if ids not in sequences:
                    sequences.append(ids)
        return sequences


class TokenDecoder:
    """Decodes a growing token sequence into whole characters, in O(1) per token.

    All pieces and the last `flush()`, joined, are the text that the tokens add after the prompt:
    `decode(prompt + tokens)` without its `decode(prompt)`. Vocabularies with byte fallback turn a whole
    run of byte tokens into U+FFFD when one is wrong; there the pieces keep what was already complete.
    """

    def __init__(
        self,
        vocabulary: TokenText,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special if skip_special_tokens else frozenset()
        self._join_added = not skip_special_tokens and not spaces_between_special_tokens
        self._last_added = False
        self._window = [token for token in prompt_token_ids[-_CONTEXT:] if self._has_text(token)]
        self._covered = 0
        """Number of tokens of the window from which the last piece was made."""
        self._shown = 0
        """Number of characters of the window's text that have been returned."""
        self._cover_but_last()

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that is now certain; "" while a character is incomplete."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode()
        waiting = len(self._window) - self._covered
        if text.endswith(_REPLACEMENT):
            if waiting < _PATIENCE:
                return ""
            # These bytes are broken and not an incomplete character. Only the last one may still begin one.
            new = text[self._shown : -1]
            self._window = self._window[-_PATIENCE:]
            self._cover_but_last()
            return new
        new = text[self._shown :]
        if self._join_added:
            added = self._vocabulary.added.get(token_id)
            if added is not None and self._last_added and waiting == 1:
                new = added
            self._last_added = added is not None
        if new:
            self._window = self._window[self._covered :]
            self._covered, self._shown = len(self._window), len(self._decode())
        return new

    def rest(self) -> str:
        """What `flush` would return now."""
        return self._decode()[self._shown :]

    def flush(self) -> str:
        """Return the rest at the end of the output. An incomplete character becomes U+FFFD."""
        text = self._decode()
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _has_text(self, token_id: int) -> bool:
        return token_id < self._vocabulary.size and token_id not in self._hidden

    def _decode(self) -> str:
        return self._vocabulary.decode(self._window)

    def _cover_but_last(self) -> None:
        """Mark the window as returned, except for a character that its last tokens may have begun."""
        text = self._decode()
        self._covered = len(self._window)
        self._shown = len(text) - text.endswith(_REPLACEMENT)


class IncrementalDetokenizer:
    """Makes the visible text of one output. An end that may begin a stop string is held back.

        decoded text   | visible . . . . . . . . | held |
                                                 └ may be the beginning of a stop string

    The text ends where a stop string begins, or after it with `include_stop_str_in_output` (then nothing is
    held back). If several stop strings match, the one that is complete first counts, and among those the
    first in the list. Without a vocabulary, or with `detokenize=False`, the text stays empty.

    Skipped special tokens have no text, but a stop string may name one. In the held text, a mark replaces
    such a token. A mark is a character that never occurs in text. A second form of the stop string has the
    same mark:

        stop string  "<|end|>\\n"        tokens   a   <|end|>   \\n        held  "⌷", then "⌷\\n": found
        second form  "⌷\\n"
    """

    def __init__(
        self,
        vocabulary: TokenText | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decoder: TokenDecoder | None = None
        if vocabulary is not None and params.detokenize:
            self._decoder = TokenDecoder(
                vocabulary,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )
        self._named = {stop: stop for stop in params.stop_strings}
        """By form, the stop string that it is a form of."""
        self._marks: dict[int, str] = {}
        """Marks of the skipped tokens that stop strings name."""
        if self._decoder is not None and vocabulary is not None and params.skip_special_tokens:
            self._marks, self._named = _mark_skipped(vocabulary, params.stop_strings)
        self._stops = tuple(self._named)
        self._unseen = {ord(mark): None for mark in self._marks.values()}
        self._include = params.include_stop_str_in_output
        # Text may be shown before it is known whether it begins a stop string. A mark may not.
        self._holds = not self._include or bool(self._marks)
        self._pieces: list[str] = []
        self._delta: list[str] = []
        self._held = ""
        self._closed = False

    @property
    def decodes(self) -> bool:
        """True if this makes text."""
        return self._decoder is not None

    @property
    def text(self) -> str:
        """Everything visible so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def take(self) -> str:
        """What has become visible since the last call."""
        delta = "".join(self._delta)
        self._delta.clear()
        return delta

    def append(self, token_id: int, *, match_stops: bool = True) -> str | None:
        """Add a token. If a stop string is now complete, closes the text and returns that stop string.

        With `match_stops=False`, stop strings that this token completes are ordinary text.
        """
        if self._closed or self._decoder is None:
            return None
        mark = self._marks.get(token_id)
        if mark is None:
            return self._absorb(self._decoder.push(token_id), match_stops)
        # An incomplete character before it counts as text only if the output ends here.
        rest = self._decoder.rest()
        ends = match_stops and _first_stop(self._held + rest + mark, len(self._held), self._stops)
        return self._absorb(rest + mark if ends else mark, match_stops)

    def watches(self, token_id: int) -> bool:
        """True if a stop string names this token, although it has no text."""
        return token_id in self._marks

    def close(self, *, match_stops: bool = True) -> str | None:
        """End the output. Held-back and incomplete text becomes visible. Idempotent.

        Returns a stop string completed by the incomplete rest, if any.
        """
        if self._closed or self._decoder is None:
            return None
        stop = self._absorb(self._decoder.flush(), match_stops)
        if stop is None:
            self._show(self._held if self._holds else "")
            self._held = ""
            self._closed = True
        return stop

    def _absorb(self, new: str, match_stops: bool) -> str | None:
        if not new:
            return None
        if not self._stops:
            self._show(new)
            return None
        known = len(self._held)
        pending = self._held + new
        if match_stops:
            found = _first_stop(pending, known, self._stops)
            if found is not None:
                form, begin = found
                stop = self._named[form]
                if self._holds:
                    self._show(pending[:begin])
                    self._show(stop if self._include else "")
                else:
                    self._show(pending[known : begin + len(stop)])
                self._held = ""
                self._closed = True
                return stop
        held = _possible_beginning(pending, self._stops)
        self._show(pending[: len(pending) - held] if self._holds else new)
        self._held = pending[len(pending) - held :]
        return None

    def _show(self, text: str) -> None:
        text = text.translate(self._unseen) if self._unseen else text
        if text:
            self._pieces.append(text)
            self._delta.append(text)


def _mark_skipped(vocabulary: TokenText, stops: Sequence[str]) -> tuple[dict[int, str], dict[str, str]]:
    """A mark for each skipped special token in a stop string, and the stop string of each form."""
    marks: dict[int, str] = {}
    named: dict[str, str] = {}
    special = {vocabulary.added[token]: token for token in vocabulary.special if vocabulary.added[token]}
    for stop in stops:
        named.setdefault(stop, stop)
        parts = sorted((text for text in special if text in stop), key=len, reverse=True)
        if parts:
            for text in parts:
                marks.setdefault(special[text], chr(_FIRST_MARK + len(marks)))
            form = re.sub("|".join(map(re.escape, parts)), lambda found: marks[special[found[0]]], stop)
            named.setdefault(form, stop)
    return marks, named


def _first_stop(text: str, known: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that is complete first and ends after `known`, and where it begins."""
    best: tuple[int, str, int] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, known - len(stop) + 1))
        if begin >= 0 and (best is None or begin + len(stop) < best[0]):
            best = begin + len(stop), stop, begin
    return None if best is None else best[1:]


def _possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins a stop string without completing it."""
    longest = 0
    for stop in stops:
        begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while begin >= 0:
            if stop.startswith(text[begin:]):
                longest = max(longest, len(text) - begin)
                break
            begin = text.find(stop[0], begin + 1)
    return longest


class Finish(NamedTuple):
    """Why an output ended."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or stop string; None for EOS, length and abort."""


class StopChecker:
    """Decides after each token of one output whether it ends, and keeps its text up to date.

    It checks in vLLM's order. First EOS (unless `ignore_eos`) and stop tokens, from `min_tokens` on. Then the
    length. Then stop strings that a token after the first `min_tokens` completes. A stop string takes
    precedence over the length. The text of a final EOS or stop token is left out unless
    `include_stop_str_in_output` is set. If that token is also a stop string, the stop string is the reason.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        *,
        max_tokens: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`max_tokens` limits the output tokens: the lesser of `params.max_tokens` and what the model's
        length leaves."""
        self.detokenizer = detokenizer
        self.num_tokens = 0
        """Number of output tokens so far."""
        self._params = params
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_ids)

    def push(self, token_id: int) -> Finish | None:
        """Add the next output token. Returns why the output ends, or None if it goes on."""
        self.num_tokens += 1
        finish: Finish | None = None
        if self.num_tokens >= self._params.min_tokens:
            if token_id in self._eos:
                finish = Finish("stop")
            elif token_id in self._stop_ids:
                finish = Finish("stop", token_id)
        shown = finish is None or self._params.include_stop_str_in_output
        shown = shown or self.detokenizer.watches(token_id)
        if finish is None and self.num_tokens >= self._max_tokens:
            finish = Finish("length")

        match_stops = self.num_tokens > self._params.min_tokens
        stop = self.detokenizer.append(token_id, match_stops=match_stops) if shown else None
        if stop is None and finish is not None:
            stop = self.detokenizer.close(match_stops=match_stops)
        return finish if stop is None else Finish("stop", stop)

    def abort(self) -> Finish:
        """End the output for a reason outside the request, such as an abort."""
        self.detokenizer.close(match_stops=False)
        return Finish("abort")
