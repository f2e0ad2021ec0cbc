"""Engines for tests, and the reference: transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from tests.models.tiny import build
from vattn import LLM, SamplingParams
from vattn.engine.deltas import RequestDelta
from vattn.engine.output_collector import OutputCollector
from vattn.kv.layout import KVShape
from vattn.models.loader import LoadedModel, load_model
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams
from vattn.vmm.host import HostDriver

BACKENDS: dict[str, dict[str, Any]] = {
    "virtual-interleaved": {"kv_backend": "virtual", "kv_layout": "interleaved", "page_bytes": 4096},
    "virtual-per_layer": {"kv_backend": "virtual", "kv_layout": "per_layer"},
    "virtual-overlap": {
        "kv_backend": "virtual",
        "kv_layout": "interleaved",
        "page_bytes": 4096,
        "overlap": True,
        "background_mapping": True,
    },
    "paged-16": {"kv_backend": "paged", "block_size": 16},
    "paged-overlap": {"kv_backend": "paged", "block_size": 16, "overlap": True},
    "paged-7": {"kv_backend": "paged", "block_size": 7},
    "static-interleaved": {"kv_backend": "static", "kv_layout": "interleaved"},
    "static-per_layer": {"kv_backend": "static", "kv_layout": "per_layer"},
}


@lru_cache(maxsize=1)
def reference_model(name: str) -> PreTrainedModel:
    """The tiny model `name` with transformers' own attention."""
    model = build(name)
    model.set_attn_implementation("sdpa")
    return model


@lru_cache(maxsize=1)
def loaded(name: str) -> LoadedModel:
    """The same weights, loaded the way `LLM` does."""
    return load_model(build(name), device="cpu")


def kv_shape(name: str) -> KVShape:
    spec = loaded(name).spec
    return KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype)


def make_llm(name: str, backend: str, **options: Any) -> LLM:
    """A small engine; its driver has the smallest pages, so that short requests need several."""
    options = {"kv_cache_memory_bytes": 64 << 20, "driver": HostDriver(granularity=4096), **options}
    return LLM(loaded(name), **BACKENDS[backend], **options)


def hf_greedy(
    model: PreTrainedModel, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> list[list[int]]:
    """Greedy continuations by `model.generate`, one prompt at a time, EOS ignored."""
    outputs = []
    for prompt, n in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


_STEPPED: WeakKeyDictionary[LLM, Stepped] = WeakKeyDictionary()


def stepped(llm: LLM) -> Stepped:
    """The same for the same LLM."""
    if llm not in _STEPPED:
        _STEPPED[llm] = Stepped(llm)
    return _STEPPED[llm]


class Stepped:
    """An LLM whose engine is stepped by hand, one step at a time, instead of by its loop.

    The loop steps for requests that came through it, so it leaves these alone.
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self._collectors: dict[str, OutputCollector] = {}

    def add_request(
        self, request_id: str, prompt: list[int], params: SamplingParams | BeamSearchParams, **terms: Any
    ) -> None:
        self.engine.add_request(request_id, prompt, params, **terms)
        vocabulary = self.engine.intake.vocabulary
        self._collectors[request_id] = OutputCollector(request_id, None, prompt, params, vocabulary)

    def step(self) -> list[RequestOutput]:
        """One step; outputs of requests that ended, and of streamed ones that got a token."""
        return self._outputs(self.engine.step())

    def taken(self) -> list[RequestOutput]:
        """What was to be reported before a step that failed."""
        return self._outputs(self.engine.take_deltas())

    def run(self) -> dict[str, RequestOutput]:
        """Step until nothing is left to do; the last outputs."""
        done: dict[str, RequestOutput] = {}
        while self.engine.has_work:
            done |= {output.request_id: output for output in self.step()}
        return done

    def _outputs(self, deltas: Sequence[RequestDelta]) -> list[RequestOutput]:
        outputs = []
        for delta in deltas:
            collector = self._collectors[delta.request_id]
            collector.add(delta)
            outputs.append(collector.output())
        return outputs
