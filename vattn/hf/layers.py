"""The layers of a `VirtualCache`: transformers' dynamic layers, with memory that grows in place.

A layer has the interface of transformers' `DynamicLayer` and returns the same numbers. The difference is that
`update` writes only the new tokens, and that the tensors it returns are views of memory that never moves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from transformers.cache_utils import DynamicLayer

from vattn.errors import CapacityError, ConfigError, VattnError
from vattn.hf.layout import Plan
from vattn.hf.moves import apply_moves, plan_moves
from vattn.hf.source import Arena
from vattn.hf.tape import Tape


class VirtualLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A layer with full attention, which keeps every token.

    `keys` and `values` hold the tokens so far, `[batch, heads, tokens, dim]`; None before the first update.
    """

    def __init__(self, arena: Arena, **kwargs: Any) -> None:
        self._memory: Tape | None = None
        self._arena = arena
        self._length = 0  # tokens ever seen and not cropped
        self._held = 0  # the last of them, which are there
        super().__init__(**kwargs)

    @property
    def _tape(self) -> Tape | None:
        """The layer's memory; None before the first token. Raises WrongProcess in a forked child."""
        if self._memory is not None:
            self._memory.owner.require()
        return self._memory

    @_tape.setter
    def _tape(self, tape: Tape | None) -> None:
        self._memory = tape

    # Tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve addresses for states of this batch, heads, dims and dtypes. Maps no memory yet."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch_size = key_states.shape[0]
        plan = self._arena.plan(key_states, value_states)
        if self._tape is None or self._tape.plan != plan:
            self._tape = self._new_tape(plan)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states `[batch, heads, new tokens, dim]`; returns views of all keys and all values.

        Raises `CapacityError` beyond `max_len`, `OutOfMemory` if there is no memory to grow into,
        `ConfigError` for states of another shape and `VattnError` under autograd. The layer is then
        unchanged. After `OutOfMemory`, earlier layers already hold the new tokens: call `crop(length)` on the
        cache.
        """
        if torch.compiler.is_compiling():
            states: tuple[torch.Tensor, torch.Tensor] = _outside_graph(self, key_states, value_states)
            return states
        return self._append(key_states, value_states)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tape = self._accept(key_states, value_states)
        start = self._length
        end = start + key_states.shape[-2]
        if not end:
            return key_states, value_states
        tape.fit(end)
        tape.keys(start, end).copy_(key_states)
        tape.values(start, end).copy_(value_states)
        self._length = self._held = end
        return tape.keys(0, end), tape.values(0, end)

    def get_seq_length(self) -> int:
        """Number of tokens so far."""
        return self._length

    def get_max_length(self) -> int:
        """Maximum number of tokens: `max_len`."""
        return self._arena.max_len

    @property
    def keys(self) -> torch.Tensor | None:
        """View of the keys."""
        return self._view(0)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._refuse_tensor("keys", tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """View of the values."""
        return self._view(1)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._refuse_tensor("values", tensor)

    # Fewer tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens. A positive number is how many first tokens to keep.

        Pages that only the dropped tokens used are given back once no view of this layer is held.
        """
        if self._tape is None or not self.is_initialized:
            return
        if tokens_to_remove > 0:
            kept = min(self._length, tokens_to_remove)
        else:
            kept = max(0, self._length + tokens_to_remove)
        self._length = self._held = kept
        self._tape.cut(kept)

    def reset(self) -> None:
        """Forget every token and give all memory back. The addresses stay, unless a view is still held."""
        self._length = self._held = 0
        self.is_initialized = False
        if self._tape is not None and not self._tape.cut(0):
            self._tape = None  # freed with the last view

    # The batch

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace sequence i by the old sequence `beam_idx[i]`. Only changed sequences are copied."""
        self.reorder(beam_idx.tolist())

    def reorder(self, rows: Sequence[int]) -> None:
        """`reorder_cache` with the indices on the host."""
        if not self._held:
            return
        if len(rows) != self.batch_size:
            self._rebatch(rows)
            return
        moves = plan_moves(rows)
        for states in (self.keys, self.values):
            assert states is not None
            apply_moves(states, moves)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in a row. Moves to other addresses."""
        if self._held and repeats != 1:
            self._rebatch([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices`. Moves to other addresses."""
        if self._held:
            rows = torch.arange(self.batch_size)[_on_cpu(indices)].tolist()
            if rows != list(range(self.batch_size)):
                self._rebatch(rows)

    # Memory

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that the layer holds."""
        return 0 if self._tape is None else self._held * self._tape.plan.token_bytes

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of mapped memory. It exceeds `nbytes` by less than `page_bytes`."""
        return 0 if self._tape is None else self._tape.nbytes_mapped

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of reserved addresses."""
        return 0 if self._tape is None else self._tape.nbytes_reserved

    @property
    def page_bytes(self) -> int:
        """Bytes by which this layer grows: a driver page in each of its ranges. 0 before the first update."""
        return 0 if self._tape is None else self._tape.page_bytes

    def check(self) -> None:
        """Raise AssertionError unless tokens, pages and driver agree."""
        if self._tape is not None:
            assert self._held <= self._length and self.nbytes <= self.nbytes_mapped
            self._tape.check()

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self._bare_copy(copy.deepcopy(self._arena, memo))
        memo[id(self)] = copied
        if self._tape is not None:
            copied._adopt(self._tape.plan, self.keys, self.values)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        saved = None
        if self._tape is not None:
            # Clone, because saving a view would save the whole address range around it.
            saved = (
                self._tape.plan,
                *(view if view is None else view.clone() for view in (self.keys, self.values)),
            )
        return {**self.__dict__, "_memory": None, "_saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        if saved is not None:
            self._adopt(*saved)

    # What transformers may ask and this cannot do

    def offload(self) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("VirtualCache does not offload: its memory is bound to a device")

    def prefetch(self) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("VirtualCache does not offload, so there is nothing to prefetch")

    # Inside

    def _new_tape(self, plan: Plan) -> Tape:
        return Tape(self._arena.source(plan), plan, self._arena.max_len)

    def _accept(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Tape:
        """Check states against the plan before anything is changed."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise VattnError(
                "VirtualCache writes in place, which autograd cannot follow: wrap the call in "
                "torch.no_grad(), or train with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tape, arena = self._tape, self._arena
        assert tape is not None
        if self._length + key_states.shape[-2] > arena.max_len:
            raise CapacityError(
                f"the cache would hold {self._length + key_states.shape[-2]:,} tokens; its max_len is "
                f"{arena.max_len:,}: VirtualCache(config, max_len=…) may be more, addresses cost no memory"
            )
        if not tape.plan.accepts(key_states, value_states):
            states = " and ".join(
                f"{list(each.shape)} of {each.dtype}" for each in (key_states, value_states)
            )
            raise ConfigError(
                f"the cache holds keys {tape.plan.key} and values {tape.plan.value}; these are {states}: "
                f"reset() it to hold others"
            )
        return tape

    def _view(self, which: int) -> torch.Tensor | None:
        if self._tape is None or not self.is_initialized:
            return None
        if not self._held:
            part = self._tape.plan.value if which else self._tape.plan.key
            return torch.empty(part.shape(0), dtype=part.dtype, device=self.device)
        self._tape.fit(self._length)
        read = self._tape.values if which else self._tape.keys
        return read(self._length - self._held, self._length)

    def _rebatch(self, rows: Sequence[int]) -> None:
        """Move to a new tape whose sequence i is the old sequence `rows[i]`."""
        assert self._tape is not None and self.keys is not None and self.values is not None
        sources = self.keys, self.values
        shapes = (states[:1].expand(len(rows), -1, -1, -1) for states in sources)
        tape = self._new_tape(self._arena.plan(*shapes))
        start, end = self._length - self._held, self._length
        tape.fit(end)
        for states, target in zip(sources, (tape.keys(start, end), tape.values(start, end)), strict=True):
            for row, source in enumerate(rows):
                target[row].copy_(states[source])
        self._tape, self.batch_size = tape, len(rows)

    def _bare_copy(self, arena: Arena) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update({**self.__dict__, "_arena": arena, "_memory": None})
        return copied

    def _adopt(self, plan: Plan, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Copy these tokens to new memory. The counters are already set."""
        self._tape = self._new_tape(plan)
        if self._held and keys is not None and values is not None:
            self._write(self._tape, keys, values)

    def _write(self, tape: Tape, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the last tokens of the text to a tape."""
        start, end = self._length - keys.shape[-2], self._length
        tape.fit(end)
        tape.keys(start, end).copy_(keys)
        tape.values(start, end).copy_(values)

    def _refuse_tensor(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            raise AttributeError(
                f"{name} of a VirtualCache lie at a fixed address and can't be replaced: use update, crop, "
                f"batch_select_indices or reset"
            )


def _append_eagerly(
    layer: VirtualLayer, key_states: torch.Tensor, value_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return layer._append(key_states, value_states)


# A compiled model leaves its graph to append: memory is mapped by the driver, not by a kernel.
_outside_graph = torch.compiler.disable(_append_eagerly)  # type: ignore[no-untyped-call]


def _on_cpu(indices: Any) -> Any:
    return indices.cpu() if isinstance(indices, torch.Tensor) else indices
