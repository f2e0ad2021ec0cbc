"""Traces: the three formats, and what is shared between their requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.trace import TraceWorkload, read_trace

OWN = """\
{"arrival": 0.5, "prompt_len": 30, "output_len": 9}
{"arrival": 0.25, "prompt_len": 10, "output_len": 4, "session": "a"}

{"arrival": 2.0, "prompt_len": 20, "output_len": 5, "session": "a"}
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1300, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1500, "output_length": 40, "hash_ids": [0, 1, 7]}
{"timestamp": 3052, "input_length": 600, "output_length": 30, "hash_ids": [8, 9]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""


def trace(tmp_path: Path, text: str, **options: object) -> TraceWorkload:
    file = tmp_path / "trace"
    file.write_text(text)
    return TraceWorkload.read(file, **options)  # type: ignore[arg-type]


def test_own_format(tmp_path: Path) -> None:
    workload = trace(tmp_path, OWN)
    requests = workload.generate(100)
    assert workload.format == "own" and workload.max_len == 39
    assert [r.arrival_s for r in requests] == [0.0, 0.25, 1.75], "sorted, from the first on"
    assert [r.session for r in requests] == ["a", None, "a"]
    assert [len(r.prompt_token_ids) for r in requests] == [10, 30, 6], "20 tokens, 14 said before"
    assert [r.output_len for r in requests] == [4, 9, 5]


def test_mooncake_requests_share_the_blocks_their_ids_share(tmp_path: Path) -> None:
    workload = trace(tmp_path, MOONCAKE)
    a, b, c = workload.generate(1000)
    assert workload.format == "mooncake"
    assert [r.arrival_s for r in (a, b, c)] == [0.0, 3.052, 3.052]
    assert [len(r.prompt_token_ids) for r in (a, b, c)] == [1300, 1500, 600]
    assert a.prompt_token_ids[:1024] == b.prompt_token_ids[:1024]
    assert a.prompt_token_ids[1024:1100] != b.prompt_token_ids[1024:1100]
    assert a.prompt_token_ids[:512] != c.prompt_token_ids[:512]


@pytest.mark.parametrize("scale", [0.1, 0.013, 0.5])
def test_scaled_mooncake_blocks_are_still_shared(tmp_path: Path, scale: float) -> None:
    a, b, _ = trace(tmp_path, MOONCAKE, length_scale=scale).generate(1000)
    shared = round(1024 * scale)
    assert len(a.prompt_token_ids) == round(1300 * scale)
    assert a.prompt_token_ids[:shared] == b.prompt_token_ids[:shared]
    assert a.prompt_token_ids[shared:] != b.prompt_token_ids[shared : len(a.prompt_token_ids)]


def test_burstgpt_leaves_failures_out(tmp_path: Path) -> None:
    workload = trace(tmp_path, BURSTGPT)
    requests = workload.generate(100)
    assert workload.format == "burstgpt"
    assert [(r.arrival_s, len(r.prompt_token_ids), r.output_len) for r in requests] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]


def test_burstgpt_with_sessions_and_other_columns(tmp_path: Path) -> None:
    text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    workload = trace(tmp_path, text + "1.5,7,2.0,GPT-4,12.0,3.0,15.0,API log\n")
    assert [(r.prompt_len, r.output_len) for r in workload.rows] == [(12, 3)]


def test_the_first_requests_alone(tmp_path: Path) -> None:
    assert len(trace(tmp_path, MOONCAKE, limit=2).rows) == 2


def test_a_trace_can_be_made_again(tmp_path: Path) -> None:
    workload = trace(tmp_path, MOONCAKE, seed=3)
    assert workload.generate(500) == workload.generate(500)
    assert workload.generate(500) != trace(tmp_path, MOONCAKE, seed=4).generate(500)
    assert workload.describe() == {
        "name": "trace", "file": "trace", "format": "mooncake", "requests": 3, "length_scale": 1.0, "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{\n", "line 1: not JSON"),
        ('{"arrival": 0, "prompt_len": 5}', "line 1: there is no 'output_len'"),
        ('{"arrival": 0, "prompt_len": 5, "output_len": 1}\n[1]', "line 2"),
        ('{"arrival": 0, "prompt_len": 0, "output_len": 1}', "at least 1"),
        ('{"arrival": "NaN", "prompt_len": 2, "output_len": 1}', "no time"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "do not cover 600"),
        ("Timestamp,Model\n5,GPT-4", "line 2: there is no 'Response tokens'"),
        ("Timestamp,Request tokens,Response tokens\n5,x,3", "line 2"),
        (OWN.replace('"prompt_len": 20', '"prompt_len": 14'), "session 'a'"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        trace(tmp_path, text)
    assert says in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")
