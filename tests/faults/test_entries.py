"""Whatever fails under `generate`, `stream`, `chat` and `beam_search`: the caller is told, and all go on.

The tests beside this one step the engine by hand; here its loop does, as for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.engines import BACKENDS
from tests.faults.flaky import Flaky
from tests.faults.test_engine import POINTS, Point, driver_error
from tests.inputs.written import loaded, make_llm
from tests.vmm.faulty import CALLS, FaultyDriver
from vattn import LLM, BeamSearchParams, RequestOutput, SamplingParams
from vattn.errors import DriverError, VattnError
from vattn.vmm.host import HostDriver

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the user and the assistant", "the user and the other user", "an assistant"]
TOLD = (VattnError, DriverError)
"""What callers may be told by; anything else is a fault of ours that got out."""

Entry = Callable[[LLM], list[RequestOutput]]

ENTRIES: dict[str, Entry] = {
    "generate": lambda llm: llm.generate(PROMPTS, PARAMS, use_tqdm=False),
    "stream": lambda llm: [list(llm.stream(prompt, PARAMS))[-1] for prompt in PROMPTS],
    "chat": lambda llm: llm.chat([{"role": "user", "content": "the user"}], PARAMS, use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search(
        PROMPTS[:2], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True), use_tqdm=False
    ),
    "several": lambda llm: llm.generate(
        PROMPTS, SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True), use_tqdm=False
    ),
}


def make(backend: str, **options: Any) -> LLM:
    """So little memory that requests yield to each other, and swap."""
    token = loaded().spec.num_layers * 2 * loaded().spec.num_kv_heads * loaded().spec.head_dim * 4
    return make_llm(
        **{
            **BACKENDS[backend],
            "driver": HostDriver(granularity=4096),
            "kv_cache_memory_bytes": 150 * token,
            "max_model_len": 64,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 24,
            "preemption": "swap",
            "swap_space_bytes": 1 << 20,
            **options,
        }
    )


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[list[int]]]]:
    with make("paged-16", kv_cache_memory_bytes=8 << 20) as llm:
        return {name: tokens(entry(llm)) for name, entry in ENTRIES.items()}


def survives(llm: LLM, name: str, expected: dict[str, Any]) -> None:
    """Call an entry while something fails. Who gets an output without an error gets the right one."""
    try:
        outputs = ENTRIES[name](llm)
    except TOLD:
        outputs = []
    for output, right in zip(outputs, expected[name], strict=bool(outputs)):
        if output.error is None:
            assert [completion.token_ids for completion in output.outputs] == right
        else:
            assert output.outputs == [] or {c.finish_reason for c in output.outputs} & {"error"}


def goes_on(llm: LLM, expected: dict[str, Any]) -> None:
    """Nothing is left of what failed, and the next call works."""
    assert tokens(ENTRIES["generate"](llm)) == expected["generate"]
    llm.check()
    assert not llm.engine.requests() and llm.memory_usage().in_use == 0
    assert llm.engine.kv.swap is None or llm.engine.kv.swap.used_bytes == 0


def cases() -> Iterator[tuple[Point, str]]:
    """Each point on the first backend it has, and on one that overlaps steps."""
    for point in POINTS:
        yield point, point.backends[0]
        yield from ((point, backend) for backend in point.backends[1:] if backend.endswith("overlap"))


@pytest.mark.parametrize(
    ("point", "backend"), [pytest.param(p, b, id=f"{p.name}, {b}") for p, b in cases()]
)
def test_any_call_may_fail_under_any_entry(
    point: Point, backend: str, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    with make(backend) as llm:
        for number, name in enumerate(ENTRIES):
            with monkeypatch.context() as patch:
                Flaky(patch, point.owner, point.call, 1 + number, point.every, point.failure)
                survives(llm, name, expected)
            goes_on(llm, expected)


@pytest.mark.parametrize("kind", CALLS[2:])
@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-overlap"])
def test_any_driver_call_may_fail_under_any_entry(backend: str, kind: str, expected: dict[str, Any]) -> None:
    driver = FaultyDriver(HostDriver(granularity=4096), kinds=[kind])
    with make(backend, driver=driver) as llm:
        for name in ENTRIES:
            for call in (1, 2, 4, 7):
                driver.arm(call)
                survives(llm, name, expected)
                driver.heal()
                goes_on(llm, expected)


def test_an_ending_that_fails_for_long_does_not_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    """A request whose memory can't be let go ends all the same; its memory follows when it can."""
    with make("paged-16", kv_cache_memory_bytes=8 << 20) as llm:
        with monkeypatch.context() as patch:
            Flaky(patch, type(llm.engine.kv), "free", 1, 1, driver_error)
            for _ in range(3):
                assert tokens(ENTRIES["generate"](llm)) == expected["generate"]
                llm.check()
            assert llm.memory_usage().in_use > 0
        goes_on(llm, expected)
