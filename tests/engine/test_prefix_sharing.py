"""Prefixes shared between requests: the same tokens as without, less work, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import (
    hf_greedy,
    kv_shape,
    loaded,
    make_llm,
    random_prompts,
    reference_model,
    stepped,
)
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError
from vattn.vmm.host import HostDriver

NAME = "llama"
SHARING = [
    "virtual-interleaved",
    "virtual-per_layer",
    "virtual-overlap",
    "paged-16",
    "paged-overlap",
    "paged-7",
]
sharing = pytest.mark.parametrize("backend", SHARING)


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def vocab() -> int:
    return loaded(NAME).spec.vocab_size


def tokens_of(llm: LLM, prompts: list[list[int]], n: int = 5) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(n), use_tqdm=False)
    llm.check()
    return [o.outputs[0].token_ids for o in outputs]


def reference(prompts: list[list[int]], n: int = 5) -> list[list[int]]:
    return hf_greedy(reference_model(NAME), prompts, [n] * len(prompts))


def page_tokens(llm: LLM) -> int:
    """Tokens whose end is near the end of a page (or block)."""
    kv = llm.describe_kv()
    if "block_size" in kv:
        return int(kv["block_size"])
    per_token = kv_shape(NAME).token_bytes
    if kv["layout"] == "per_layer":
        per_token //= 2 * kv_shape(NAME).num_layers
    return int(kv["page_bytes"]) // per_token


@sharing
def test_shared_system_prompts_around_every_border(backend: str) -> None:
    """Prefixes one less, equal and one more than pages, blocks and units: equal tokens, and hits."""
    with make_llm(NAME, backend, max_model_len=256) as llm:
        page = min(page_tokens(llm), 60)
        lengths = sorted({n + d for n in (1, 16, 32, page, 2 * page) for d in (-1, 0, 1)} - {0})
        for length in lengths:
            llm.reset_prefix_cache()
            [prefix] = random_prompts(length, [length], vocab())
            tails = random_prompts(7, [1, 1, 5, 20], vocab())
            prompts = [prefix + tail for tail in tails] + [prefix, prefix]
            first = tokens_of(llm, prompts[:1])
            assert first + tokens_of(llm, prompts[1:]) == reference(prompts), length
            again = llm.generate(prompts, greedy(5), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in again] == reference(prompts), length
            for output, prompt in zip(again, prompts, strict=True):
                unit = int(llm.describe_kv().get("block_size", 16))
                whole = len(prompt) // unit * unit
                cached = output.num_cached_tokens
                assert cached <= len(prompt) - 1
                assert cached >= min(whole, len(prompt) - 1) // unit * unit, (length, len(prompt))


@sharing
def test_a_common_prefix_is_computed_once(backend: str) -> None:
    """Also when all requests arrive together: who could share waits for the one that computes."""
    [prefix] = random_prompts(0, [192], vocab())
    prompts = [prefix + tail for tail in random_prompts(1, [8] * 12, vocab())]
    with make_llm(NAME, backend, max_num_batched_tokens=1024, max_model_len=256) as llm:
        assert tokens_of(llm, prompts, 4) == reference(prompts, 4)
        m, unit = llm.metrics(), int(llm.describe_kv().get("block_size", 16))
    cached = 192 // unit * unit
    assert m.kv_stats.prefix_hit_tokens == 11 * cached
    assert m.computed_tokens == 12 * (200 + 3) - 11 * cached
    assert m.kv_stats.prefix_query_tokens == 12 * 200


@sharing
def test_turns_of_a_chat(backend: str) -> None:
    """Each turn's prompt goes on where the last answer ended."""
    with make_llm(NAME, backend, max_model_len=256) as llm:
        history: list[int] = []
        for turn, question in enumerate(random_prompts(5, [21, 9, 14, 30], vocab())):
            history += question
            [output] = llm.generate([history], greedy(11), use_tqdm=False)
            llm.check()
            assert [output.outputs[0].token_ids] == reference([history], 11)
            if turn:
                assert output.num_cached_tokens >= len(history) - len(question) - 16
            history += output.outputs[0].token_ids
        stats = llm.metrics().kv_stats
        if backend.startswith("virtual"):  # the finished row itself was taken over
            assert stats.rows_continued == 3 and stats.tails_copied == 0


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer", "paged-16"])
def test_a_tiny_budget_evicts_prefixes_before_anybody_is_preempted(backend: str) -> None:
    budget = {"virtual-per_layer": 30 * 4096 * 2 * kv_shape(NAME).num_layers}.get(backend)
    budget = budget or 160 * kv_shape(NAME).token_bytes
    prompts = [
        p + q for p in random_prompts(2, [40] * 6, vocab()) for q in random_prompts(3, [6, 9], vocab())
    ]
    with make_llm(NAME, backend, max_model_len=96, kv_cache_memory_bytes=budget, max_num_seqs=2) as llm:
        got = []
        for prompt in prompts:
            got += tokens_of(llm, [prompt])
        assert got == reference(prompts)
        m = llm.metrics()
        assert m.preemptions == 0
        if backend != "virtual-per_layer":
            assert m.kv_stats.prefix_evictions > 0
        assert m.kv_stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-overlap", "paged-16"])
def test_preemption_and_abort_in_the_middle(backend: str) -> None:
    [prefix] = random_prompts(8, [40], vocab())
    prompts = [prefix + tail for tail in random_prompts(9, [5, 11, 3, 8, 14, 2], vocab())]
    with make_llm(
        NAME, backend, max_model_len=128, kv_cache_memory_bytes=230 * kv_shape(NAME).token_bytes
    ) as llm:
        stepped(llm).add_request("doomed", prefix + [5] * 9, greedy(60))
        stepped(llm).step()
        ids = [f"r{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            stepped(llm).add_request(request_id, prompt, greedy(40))
        for _ in range(12):
            stepped(llm).step()
            llm.check()
        assert llm.engine.abort("doomed")
        done: dict[str, Any] = {}
        while llm.engine.has_work:
            done.update({o.request_id: o for o in stepped(llm).step()})
            llm.check()
        assert [done[i].outputs[0].token_ids for i in ids] == reference(prompts, 40)
        m = llm.metrics()
        assert m.preemptions > 0 and m.kv_stats.resumed_hit_tokens > 0
        per_request = sum(done[i].metrics.num_cached_tokens for i in ids)
        assert per_request == m.kv_stats.prefix_hit_tokens, "hits are counted once per request"


def services(n: int) -> list[Any]:
    from vattn.engine.service import Service

    return [Service()] * n


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-16"])
def test_salts_and_prompt_logprobs_keep_to_themselves(backend: str) -> None:
    [prompt] = random_prompts(4, [50], vocab())
    with make_llm(NAME, backend) as llm:

        def cached(**more: Any) -> bool:
            request = {"prompt_token_ids": prompt, **more}
            [output] = llm.generate([request], greedy(2), use_tqdm=False)  # type: ignore[list-item]
            assert [output.outputs[0].token_ids] == reference([prompt], 2)
            assert output.num_cached_tokens in (0, 48, 49)
            return output.num_cached_tokens > 0

        assert [cached(), cached()] == [False, True]
        assert [cached(cache_salt="a"), cached(cache_salt="a")] == [False, True]
        assert [cached(cache_salt="b"), cached()] == [False, True]
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.num_cached_tokens == 0 and len(output.prompt_logprobs or []) == 50
        llm.reset_prefix_cache()
        assert not cached()


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-16"])
def test_no_caching_no_hits(backend: str) -> None:
    prompts = random_prompts(4, [50], vocab()) * 3
    with make_llm(NAME, backend, enable_prefix_caching=False) as llm:
        assert tokens_of(llm, prompts) == reference(prompts)
        assert llm.metrics().kv_stats.prefix_hit_tokens == 0
        assert llm.memory_usage().cached == 0


def test_static_says_that_it_cannot() -> None:
    with pytest.raises(ConfigError, match=r"static.*virtual"):
        make_llm(NAME, "static-interleaved", enable_prefix_caching=True)
    with make_llm(NAME, "static-interleaved") as llm:
        assert not llm.engine.kv.shares_prefixes


def test_what_the_model_is_decides_who_shares() -> None:
    """Weights, dtype and rope are in the fingerprint, adapters in every request's chain."""
    from tests.models.tiny import build
    from vattn.models.loader import load_model

    base = load_model(build(NAME), device="cpu")
    other = build(NAME)
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    rope = build(NAME)
    rope.config.rope_parameters = {**rope.config.rope_parameters, "rope_theta": 12345.0}
    prints = [
        base.fingerprint,
        load_model(other, device="cpu").fingerprint,
        load_model(rope, device="cpu").fingerprint,
        load_model(build(NAME).bfloat16(), device="cpu").fingerprint,
    ]
    assert len(set(prints)) == 4, prints
    with LLM(base, driver=HostDriver(granularity=4096)) as llm:
        [prompt] = random_prompts(4, [50], vocab())
        llm.generate([prompt], greedy(1), use_tqdm=False)
        base.model._hf_peft_config_loaded = True  # as transformers' adapter mixin does
        base.model.active_adapters = lambda: ["french"]
        try:
            [output] = llm.generate([prompt], greedy(1), use_tqdm=False)
        finally:
            del base.model._hf_peft_config_loaded, base.model.active_adapters
        assert output.num_cached_tokens == 0
        [output] = llm.generate([prompt], greedy(1), use_tqdm=False)
        assert output.num_cached_tokens >= 48
