"""Any sequence of calls leaves a `VirtualCache` and a `DynamicCache` with the same numbers and answers."""

from __future__ import annotations

import copy
import pickle
from collections import deque

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import DynamicCache, Gemma2Config

from vattn import VirtualCache

HEADS, DIM = 2, 24


class Caches(RuleBasedStateMachine):
    """One layer that slides, one that does not, through everything a caller may do."""

    @initialize(
        window=st.sampled_from([2, 3, 7, 50, 200]),
        layout=st.sampled_from(["heads", "tokens"]),
        page=st.sampled_from([4096, 8192, None]),
        record=st.booleans(),
        batch=st.integers(1, 3),
    )
    def start(self, window: int, layout: str, page: int | None, record: bool, batch: int) -> None:
        config = Gemma2Config(
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=DIM,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"],
        )
        self.window, self.record, self.batch = window, record, batch
        self.new = lambda: DynamicCache(config=config)
        self.theirs = self.new()
        self.ours = VirtualCache(config, layout=layout, page_bytes=page)  # type: ignore[arg-type]
        if record:
            self.theirs.activate_past_recording()
            self.ours.activate_past_recording()
        self.generator = torch.Generator().manual_seed(0)
        self.views: deque[torch.Tensor] = deque(maxlen=3)

    @property
    def length(self) -> int:
        return int(self.theirs.get_seq_length())

    @rule(tokens=st.one_of(st.integers(1, 3), st.integers(1, 60)))
    def update(self, tokens: int) -> None:
        for layer in range(2):
            keys, values = torch.randn(2, self.batch, HEADS, tokens, DIM, generator=self.generator)
            visible = self.theirs.get_mask_sizes(tokens, layer)[0]  # older releases may return more than that
            expected = self.theirs.update(keys, values, layer)
            got = self.ours.update(keys, values, layer)
            for mine, other in zip(got, expected, strict=True):
                assert torch.equal(mine, other[:, :, -visible:])

    @precondition(lambda self: self.length and (self.record or self.length < self.window))
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        most = self.length
        if self.length >= self.window:  # what slid out before the past was recorded is gone
            most = max(0, self.theirs.layers[0].keys.shape[-2] - (self.window - 1))
        removed = data.draw(st.integers(0, most))
        self.theirs.crop(-removed)
        self.ours.crop(-removed)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.batch - 1)
        order = torch.tensor(data.draw(st.lists(rows, min_size=self.batch, max_size=self.batch)))
        self.theirs.reorder_cache(order)
        self.ours.reorder_cache(order)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3)))
        self.theirs.batch_select_indices(rows)
        self.ours.batch_select_indices(rows)
        self.batch = len(rows)

    @precondition(lambda self: self.length and self.batch == 1)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        self.theirs.batch_repeat_interleave(repeats)
        self.ours.batch_repeat_interleave(repeats)
        self.batch *= repeats

    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.theirs = self.new()  # older releases only zero what they hold
        if self.record:
            self.theirs.activate_past_recording()
        self.ours.reset()
        self.batch = batch
        assert not self.ours.nbytes

    @rule(how=st.sampled_from([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def go_on_with_a_copy(self, how: object) -> None:
        self.ours = how(self.ours)  # type: ignore[operator]

    @precondition(lambda self: self.length)
    @rule(layer=st.integers(0, 1))
    def hold_a_view(self, layer: int) -> None:
        self.views.append(self.ours.layers[layer].keys)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "ours"):
            return
        for ours, theirs in zip(self.ours.layers, self.theirs.layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length()
            if theirs.get_seq_length():
                assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
            for queries in (1, 5):
                assert ours.get_mask_sizes(queries) == theirs.get_mask_sizes(queries)
            assert ours.nbytes_mapped >= ours.nbytes
        self.ours.check()
        for view in self.views:  # may show other numbers by now, but never nothing
            view.sum()


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
