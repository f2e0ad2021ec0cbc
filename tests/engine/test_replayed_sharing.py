"""The log of an engine that shares, forks, searches, yields and aborts replays without a difference."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.engines import BACKENDS, kv_shape, loaded, make_llm, random_prompts, stepped
from vattn import LLM, BeamSearchParams, SamplingParams
from vattn.engine.replay import replay

NAME = "llama"
CASES = [name for name in BACKENDS if name != "paged-7"]


def traffic(llm: LLM, seed: int, *, reset: bool) -> None:
    """Requests of every kind that begin alike, at random moments; some are aborted."""
    rng = random.Random(seed)
    vocab = loaded(NAME).spec.vocab_size
    systems, tails = random_prompts(seed, [40, 33], vocab), random_prompts(seed + 1, [1, 4, 9, 16], vocab)
    said, running = [], []
    for i in range(14):
        prompt = rng.choice(systems) + rng.choice(tails)
        prompt = rng.choice(said)[:60] + rng.choice(tails) if said and rng.random() < 0.3 else prompt
        kind, tokens = rng.choice(["one", "n", "beams", "one"]), rng.randint(1, 24)
        if kind == "beams":
            params = BeamSearchParams(beam_width=rng.choice([2, 4]), max_tokens=tokens)
        else:
            n = 4 if kind == "n" else 1
            params = SamplingParams(n=n, temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True)
        stepped(llm).add_request(f"r{i}", prompt, params, cache_salt=rng.choice(["", "", "", "s"]))
        running.append(f"r{i}")
        for _ in range(rng.randint(0, 5)):
            for output in stepped(llm).step():
                said += [o for c in output.outputs if (o := output.prompt_token_ids + list(c.token_ids))]
        llm.check()
        if i % 5 == 4:
            llm.engine.abort(rng.choice(running))
            stepped(llm).taken()
        if reset and i == 9:
            llm.reset_prefix_cache()
    while llm.engine.has_work:
        stepped(llm).step()
        llm.check()


@pytest.mark.parametrize("backend", CASES)
@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_every_decision_comes_out_again(backend: str, swap: int, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tokens = {"virtual-per_layer": 250, "static-per_layer": 400, "static-interleaved": 400}.get(backend, 200)
    with make_llm(
        NAME,
        backend,
        trace=path,
        kv_cache_memory_bytes=tokens * kv_shape(NAME).token_bytes,
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        swap_space_bytes=swap,
    ) as llm:
        traffic(llm, 3, reset=True)
        m = llm.metrics()
        if not backend.startswith("static"):
            assert m.preemptions > 0 and m.kv_stats.prefix_hit_tokens > 0
        assert m.kv_stats.forks > 0
    kinds = Counter(json.loads(line)["event"] for line in path.read_text().splitlines())
    assert kinds["arrive"] == 14 and kinds["reset"] == 1 and kinds["abort"] > 0
    assert kinds["fork"] > 0 and kinds["extend"] > 0 and kinds["drop"] > 0
    done = replay(path)
    assert done.divergence is None
    assert done.preemptions == kinds["preempt"] and done.steps == kinds["step"]
