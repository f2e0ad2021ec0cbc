"""Adapters to other engines, with stand-ins for those that are not installed."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.interleaved_run import Limits, Plan, run
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.load import drive
from vattn.lab.bench.peers.factory import peer_systems
from vattn.lab.bench.synthetic import ChatWorkload
from vattn.lab.bench.target import System
from vattn.lab.bench.tiny import load_tiny
from vattn.lab.bench.workload import RandomWorkload, WorkloadRequest
from vattn.models.loader import LoadedModel

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, kv_memory_bytes=1 << 20)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny("cpu")


def peer(name: str, loaded: LoadedModel) -> System:
    [system] = peer_systems([name], "tiny", loaded, LIMITS)
    return system


def chat() -> list[WorkloadRequest]:
    return ChatWorkload(2, 2, Lengths("fixed", 5, 5), Lengths("fixed", 3, 3)).generate(200)


# ---------------------------------------------------------------------- transformers
def test_generate_batch_serves_arriving_conversations(loaded: LoadedModel) -> None:
    with peer("generate_batch", loaded).open() as target:
        timelines = drive(chat(), Arrivals("constant", rate=100.0), target)
    assert [t.output_len for t in timelines] == [3] * 4 and all(t.success for t in timelines)
    assert [t.prompt_len for t in timelines] == [5, 5, 13, 13]
    for t in timelines:
        assert t.ttft is not None and t.ttft > 0 and all(gap > 0 for gap in t.itl)


def test_a_peer_runs_beside_our_backends(loaded: LoadedModel) -> None:
    plan = Plan("throughput", RandomWorkload(2, (4, 9), (2, 4)), Arrivals("at-once"), LIMITS, repeats=1)
    [found] = run(plan, [peer("generate_batch", loaded)], 200)["runs"]
    assert found["peer"] is True and found["repeats"][0]["steps"] is None
    assert found["repeats"][0]["metrics"]["output_throughput"] > 0


def test_generate_batch_says_when_the_budget_is_too_small(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        peer_systems(["generate_batch"], "tiny", loaded, Limits(4, 64, 128, 1000))


def test_unknown_peers_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"vllm, llama\.cpp"):
        peer("sglang", loaded)


# ---------------------------------------------------------------------- vLLM
class FakeEngine:
    """As `vllm.LLMEngine`: every step gives each request the next token; outputs are cumulative."""

    def __init__(self, args: types.SimpleNamespace) -> None:
        self.args = args
        self.requests: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.closed = False
        self.engine_core = types.SimpleNamespace(shutdown=lambda: setattr(self, "closed", True))

    @classmethod
    def from_engine_args(cls, args: types.SimpleNamespace) -> FakeEngine:
        cls.last = cls(args)
        return cls.last

    last: FakeEngine

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.ignore_eos and not params.detokenize
        self.requests[request_id] = (prompt["prompt_token_ids"], params, [])

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[types.SimpleNamespace]:
        outputs = []
        for request_id, (prompt, params, tokens) in list(self.requests.items()):
            tokens.append(len(prompt) + len(tokens))
            done = len(tokens) == params.max_tokens
            completions = [
                types.SimpleNamespace(
                    index=i, token_ids=list(tokens), finish_reason="length" if done else None
                )
                for i in range(params.n)
            ]
            outputs.append(
                types.SimpleNamespace(
                    request_id=request_id, outputs=completions, finished=done, num_cached_tokens=1
                )
            )
            if done:
                del self.requests[request_id]
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    module: Any = types.ModuleType("vllm")
    module.LLMEngine = FakeEngine
    module.EngineArgs = module.SamplingParams = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    return FakeEngine


def on_disk(loaded: LoadedModel, path: str = "/models/tiny") -> LoadedModel:
    from dataclasses import replace

    return replace(loaded, path=path, name=path)


def test_vllm_gets_the_same_limits_and_answers_through_its_steps(
    loaded: LoadedModel, vllm: type[FakeEngine]
) -> None:
    with peer("vllm", on_disk(loaded)).open() as target:
        timelines = drive([*chat(), WorkloadRequest([1], 4, n=2)], Arrivals("at-once"), target)
        engine = vllm.last
        assert not engine.closed
    assert engine.closed, "its processes end with the run"
    assert engine.args.num_gpu_blocks_override == (1 << 20) // (16 * 512)
    assert (engine.args.max_num_seqs, engine.args.max_model_len) == (4, 128)
    assert [t.output_len for t in timelines] == [3, 3, 3, 3, 8]
    assert len(timelines[4].token_times) == 2 and len(timelines[4].itl) == 6
    assert timelines[0].cached_tokens == 1


def test_vllm_is_named_when_it_is_missing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="pip install vllm"):
        peer("vllm", on_disk(loaded))


def test_vllm_needs_a_model_it_can_load_itself(loaded: LoadedModel, vllm: type[FakeEngine]) -> None:
    with pytest.raises(ConfigError, match="on disk"):
        peer("vllm", loaded)


@pytest.mark.parametrize("name", ["generate_batch", "vllm", "llama.cpp"])
def test_peers_refuse_what_they_cannot_do(
    name: str, loaded: LoadedModel, vllm: type[FakeEngine], gguf: LoadedModel
) -> None:
    model = on_disk(loaded) if name == "vllm" else gguf if name == "llama.cpp" else loaded
    with peer(name, model).open() as target, pytest.raises(ConfigError, match="leave --peer out"):
        drive([WorkloadRequest([1, 2], 3, n=2, beams=True)], Arrivals("at-once"), target)


# ---------------------------------------------------------------------- llama.cpp
SERVER = """\
#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--parallel"] == "4" and options["--ctx-size"] == "512", options

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"][0] == 99:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such prompt")
            return
        assert asked["ignore_eos"] and asked["return_tokens"] and asked["stream"]
        self.send_response(200)
        self.end_headers()
        for i in range(asked["n_predict"]):
            self.wfile.write(b"data: " + json.dumps({{"tokens": [i], "stop": False}}).encode() + b"\\n\\n")
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b'data: {{"tokens": [], "stop": true}}\\n\\n')

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def gguf(tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    server = tmp_path / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    model = tmp_path / "model.gguf"
    model.touch()
    return on_disk(loaded, str(model))


def test_llama_cpp_is_served_and_asked_over_http(gguf: LoadedModel) -> None:
    requests = [*chat(), WorkloadRequest([99], 2)]
    with peer("llama.cpp", gguf).open() as target:
        timelines = drive(requests, Arrivals("at-once"), target, max_concurrency=2)
    assert [t.output_len for t in timelines[:4]] == [3] * 4 and all(t.success for t in timelines[:4])
    assert [len(t.itl) for t in timelines[:4]] == [2] * 4 and all(
        gap >= 0 for t in timelines for gap in t.itl
    )
    assert timelines[4].error is not None and "400" in timelines[4].error


def test_llama_cpp_says_what_is_missing(
    loaded: LoadedModel, gguf: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"FILE\.gguf"):
        peer("llama.cpp", loaded)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="llama-server"):
        peer("llama.cpp", gguf)
