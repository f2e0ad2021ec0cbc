"""A layer with a sliding window. Its ring of pages is mapped twice, so that the window is contiguous."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from vattn.hf.layers import VirtualLayer
from vattn.hf.layout import Plan
from vattn.hf.tape import Ring, Tape


class VirtualSlidingLayer(VirtualLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keeps the last `sliding_window - 1` tokens, as `DynamicSlidingWindowLayer` does.

    Memory: pages for `sliding_window` tokens. They are mapped as the window fills and then reused, however
    long the text is. While the past is recorded (assisted decoding crops), the tokens since the last `crop`
    are kept too. The ring then has at least the size that they need, and at most twice that.

    An update with more tokens than the ring holds (a prompt, a large chunk) returns the states themselves, or
    a new tensor that joins them with the window.
    """

    def __init__(self, arena: Any, sliding_window: int) -> None:
        super().__init__(arena, sliding_window=sliding_window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve twice the addresses of the window."""
        super().lazy_initialization(key_states, value_states)
        # What transformers hands on where it splits a cache over processes.
        self._sliding_window_tensor: torch.Tensor = self._sliding_window_tensor.to(self.device)

    @property
    def cumulative_length(self) -> int:
        """Number of tokens so far, including those that left the window."""
        return self._length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self._length = length

    def get_max_length(self) -> int:
        """The window size, as in transformers. The text may be longer."""
        return int(self.sliding_window)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tape = self._accept(key_states, value_states)
        new, past = key_states.shape[-2], self.sliding_window - 1
        if not new and not self._held:
            return key_states, value_states
        held = self._held if self.record_past else min(self._held, past)
        if held + new > tape.tokens:
            if not self.record_past:
                return self._append_much(tape, key_states, value_states, held)
            tape = self._resize(max(held + new, tape.tokens * 3 // 2))
        start, end = self._length, self._length + new
        tape.fit(end)
        tape.keys(start, end).copy_(key_states)
        tape.values(start, end).copy_(value_states)
        self._length = end
        self._held = held + new if self.record_past else min(held + new, past)
        first = end - min(held + new, past + new)
        return tape.keys(first, end), tape.values(first, end)

    def _append_much(
        self, tape: Tape, key_states: torch.Tensor, value_states: torch.Tensor, held: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append more tokens than the ring holds. Keeps the last ones and returns all."""
        states = key_states, value_states
        start, end = self._length, self._length + key_states.shape[-2]
        tape.fit(end)
        if held:
            window = tape.keys(start - held, start), tape.values(start - held, start)
            states = torch.cat([window[0], key_states], -2), torch.cat([window[1], value_states], -2)
        self._length = end
        self._held = min(self.sliding_window - 1, held + end - start)
        kept = min(self._held, end - start)
        if kept:
            self._write(tape, key_states[:, :, -kept:], value_states[:, :, -kept:])
        return states

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicSlidingWindowLayer.crop`; below the window a positive number is what to keep."""
        if self._tape is None or not self.is_initialized:
            return
        if self._length < self.sliding_window:
            super().crop(tokens_to_remove)
            return
        if not self.record_past:
            raise RuntimeError(
                f"`crop` came when the window of {self.sliding_window} tokens was full and nothing recorded "
                f"what slid out: call `activate_past_recording()` on the cache before"
            )
        if tokens_to_remove > 0:
            raise RuntimeError(
                f"the window of {self.sliding_window} tokens is full: crop with a negative number, of tokens "
                f"to remove"
            )
        self._length += tokens_to_remove
        self._held = min(max(0, self._held + tokens_to_remove), self.sliding_window - 1)
        if self._tape.tokens > 2 * self.sliding_window + self._tape_slack():
            self._resize(self.sliding_window)

    def _new_tape(self, plan: Plan, tokens: int | None = None) -> Tape:
        return Ring(self._arena.source(plan), plan, tokens or max(self.sliding_window, self._held))

    def _resize(self, tokens: int) -> Tape:
        """Move the tokens held to a ring of another size."""
        old = self._tape
        assert old is not None
        tape = self._new_tape(old.plan, tokens)
        if self._held:
            start, end = self._length - self._held, self._length
            old.fit(end)
            self._write(tape, old.keys(start, end), old.values(start, end))
        self._tape = tape
        return tape

    def _tape_slack(self) -> int:
        """Tokens that fit a page of every range."""
        assert self._tape is not None
        return self._tape.page_bytes // self._tape.plan.token_bytes
