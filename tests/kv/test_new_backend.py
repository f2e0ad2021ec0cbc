"""A backend of one's own: a file of a few methods and a line in the table of backends (docs/extending.md)."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.engine.engines import hf_greedy, loaded, random_prompts, reference_model
from tests.kv import buddy
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError
from vattn.kv.backends import BACKENDS
from vattn.kv.backends.base import Backend
from vattn.vmm.host import HostDriver

NAME = "llama"
LENGTHS = [5, 33, 18, 40, 9, 21]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(BACKENDS, "buddy", "tests.kv.buddy:BuddyBackend")


def make(blocks: int, **options: object) -> LLM:
    spec = loaded(NAME).spec
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    return LLM(
        loaded(NAME),
        kv_backend="buddy",  # type: ignore[arg-type]
        block_size=8,
        max_model_len=64,
        kv_cache_memory_bytes=blocks * 8 * token,
        driver=HostDriver(granularity=4096),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"preemption": "swap", "swap_space_bytes": 1 << 22}]
)
def test_it_generates_the_right_tokens_under_pressure(registered: None, options: dict[str, object]) -> None:
    prompts = random_prompts(2, LENGTHS, 100)
    want = hf_greedy(reference_model(NAME), prompts, [20] * len(prompts))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with make(17, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
        llm.check()
        for _ in range(2):  # the second time it is cached
            llm.generate([prompts[0] + prompts[1]], params)
        assert llm.metrics().preemptions and llm.metrics().kv_stats.prefix_hit_tokens
        llm.resize_kv_cache(llm.memory_usage().physical * 3 // 2)
        assert [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)] == want
        llm.check()


def test_its_blocks_are_neighbours(registered: None) -> None:
    with make(64, enable_prefix_caching=False) as llm:
        streams = [
            llm.stream(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            for prompt in random_prompts(2, [9, 9, 9], 100)
        ]
        rows = []
        for _ in range(18):
            for stream in streams:
                next(stream)
            rows = [row.units for row in llm.engine.kv.page_map().rows]
        assert all(len(units) > 2 for units in rows)
        assert all(units == tuple(range(units[0], units[0] + len(units))) for units in rows)
        for stream in streams:
            stream.close()


def test_it_is_one_short_file() -> None:
    lines = Path(buddy.__file__).read_text().splitlines()
    assert len(lines) < 120
    asked = [
        name for name, member in inspect.getmembers(Backend) if getattr(member, "__isabstractmethod__", 0)
    ]
    assert len(asked) <= 8


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'buddy' is unknown: use one of 'virtual', 'paged', 'static'"):
        make(17)
