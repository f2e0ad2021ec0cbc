"""A short, busy life of an engine, and what must be true of it whatever fails on the way.

step   0        3         6        9        12      …   end
       |  r0 (n=2), r1, r2 (beams), r3, …
                |  smaller    |  abort r5
                          |  larger     |  sleep, wake up      close
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

from tests.engine.engines import kv_shape, loaded, make_llm, random_prompts, stepped
from vattn import LLM, SamplingParams
from vattn.errors import CapacityError
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams
from vattn.vmm.driver import DriverError

NAME = "llama"
PAGE = 4096
MAX_LEN = 48
ABORTED = "r5"

Tokens = list[list[int]]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


@lru_cache(maxsize=1)
def requests() -> dict[str, tuple[list[int], SamplingParams | BeamSearchParams]]:
    """Some begin alike, so that pages are shared and tails copied."""
    a, b, c = random_prompts(5, [20, 9, 14], loaded(NAME).spec.vocab_size)
    return {
        "r0": (a, SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, ignore_eos=True)),
        "r1": (b, greedy(20)),
        "r2": (b[:5], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)),
        "r3": (a + b, greedy(10)),
        "r4": (c, SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2, ignore_eos=True)),
        ABORTED: (a[:10], greedy(30)),
    }


def tokens(output: RequestOutput) -> Tokens:
    return [completion.token_ids for completion in output.outputs]


@lru_cache(maxsize=1)
def alone() -> dict[str, Tokens]:
    """Each request's tokens with all the memory in the world and no company."""
    found = {}
    with make_llm(NAME, "paged-16", max_model_len=MAX_LEN, enable_prefix_caching=False) as llm:
        for request_id, (prompt, params) in requests().items():
            stepped(llm).add_request(request_id, prompt, params)
            while llm.engine.has_work:
                found |= {output.request_id: tokens(output) for output in stepped(llm).step()}
    return found


def sets(backend: str, tokens: int) -> int:
    """Bytes of a budget that holds about so many tokens."""
    shape = kv_shape(NAME)
    if backend != "virtual-per_layer":
        return tokens * shape.token_bytes
    ranges = 2 * shape.num_layers
    return -(-tokens * shape.token_bytes // (PAGE * ranges)) * PAGE * ranges


def make(backend: str, **options: Any) -> LLM:
    return make_llm(
        NAME,
        backend,
        **{
            "max_model_len": MAX_LEN,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 24,
            "kv_cache_memory_bytes": sets(backend, 130),
            "preemption": "swap",
            "swap_space_bytes": 1 << 20,
            # Not a whole number of pages, so that prefixes end in the middle of one.
            **({"block_size": 5} if backend.startswith("virtual") else {}),
            **options,
        },
    )


def life(llm: LLM, backend: str) -> Iterator[Callable[[], object]]:
    """What is done, one thing after another; each may be tried again."""
    engine = llm.engine
    by_hand = stepped(llm)
    for request_id, (prompt, params) in requests().items():
        yield lambda r=request_id, p=prompt, q=params: engine.knows(r) or by_hand.add_request(r, p, q)
    for step in range(1000):
        yield from ([by_hand.step] if engine.has_work else [])
        if step == 4:
            yield lambda: llm.resize_kv_cache(sets(backend, 64))
        elif step == 8:
            yield lambda: llm.resize_kv_cache(sets(backend, 110))
        elif step == 10:
            yield lambda: engine.abort(ABORTED)
        elif step == 12:
            yield llm.sleep
            yield llm.wake_up
        elif step > 12 and not engine.has_work:
            return
    raise AssertionError("it does not end")


FAULTS = (DriverError, MemoryError, RuntimeError, CapacityError)


class Lived:
    """How a life went: outputs by request, and what was raised on the way."""

    def __init__(self, llm: LLM, backend: str, patience: int = 1) -> None:
        """Live it, with `check()` after every deed; a deed that raises is tried again `patience` times."""
        self.done: dict[str, RequestOutput] = {}
        self.raised: list[BaseException] = []
        for deed in life(llm, backend):
            self._do(llm, deed, patience)
        while llm.engine.scheduler.unfreed:  # what could not be let go is tried again in the next step
            llm.engine.step()
        llm.check()
        usage = llm.memory_usage()
        assert usage.in_use == usage.logical == 0
        assert llm.engine.kv.swap is None or llm.engine.kv.swap.used_bytes == 0

    def _do(self, llm: LLM, deed: Callable[[], object], patience: int) -> None:
        for attempt in range(patience + 1):
            try:
                result = deed()
            except FAULTS as error:
                self.raised.append(error)
                llm.check()
                if attempt == patience:
                    raise
            else:
                break
        llm.check()
        for output in result if isinstance(result, list) else []:
            if output.finished:
                self.done[output.request_id] = output

    def failed(self) -> dict[str, str]:
        """Requests that ended with an error, and what it says."""
        return {request_id: output.error for request_id, output in self.done.items() if output.error}

    def assert_unharmed(self, may_fail: Collection[str] = ()) -> None:
        """All have their tokens but the one aborted, and those of `may_fail` that have failed."""
        errors = self.failed()
        assert errors.keys() <= set(may_fail), errors
        for request_id, expected in alone().items():
            if request_id != ABORTED and request_id not in errors:
                assert tokens(self.done[request_id]) == expected, request_id
