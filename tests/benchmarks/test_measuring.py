"""How the GPU benchmark measures: turns, captures, budgets of time and memory, records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, memory, timing
from benchmarks.gpu.kernels import Bench
from benchmarks.gpu.memory import VirtualPlace, rotated_layers
from benchmarks.gpu.models import CONFIGS
from benchmarks.gpu.problems import LLAMA_3_8B, TINY, Heads, Problem, dry_sweep, sweep
from benchmarks.gpu.record import status_of
from benchmarks.gpu.sanitizer import OUTPUT_TOKENS, PAGE_FULL
from vattn.kv.layout import KVLayout, KVShape
from vattn.vmm.host import HostDriver

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------- timing
class Gpu:
    """A pretended GPU: launches take `cost` ms, in order, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capturable: bool = True) -> None:
        self.now, self.log, self.capturing = 0.0, [], None  # type: ignore[var-annotated]
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.launches: list[Callable[[], None]] = []

            def replay(self) -> None:
                for launch in self.launches:
                    launch()

        @contextmanager
        def capture(graph: Graph) -> Any:
            if not capturable:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            gpu.capturing = graph
            yield
            gpu.capturing = None

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        properties = SimpleNamespace(L2_cache_size=1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)

    def work(self, name: str, ms: float) -> timing.Call:
        def call(i: int) -> None:
            def launch() -> None:
                self.now += ms
                self.log.append((name, i))

            if self.capturing is None:
                launch()
            else:
                self.capturing.launches.append(launch)

        return call


def test_short_work_is_captured_many_times_over_and_timed_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    clock = timing.CudaClock("cpu")
    contestants = {"short": clock.prepare(gpu.work("s", 0.05)), "long": clock.prepare(gpu.work("l", 50.0))}
    found = timing.take_turns(contestants)
    assert found["short"].median_us == pytest.approx(50.0) and found["long"].median_us == pytest.approx(
        50_000.0
    )
    assert (found["short"].calls, found["short"].samples, found["short"].graph) == (20, 11, True)
    assert (found["long"].calls, found["long"].samples) == (1, 5)


def test_turns_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    clock = timing.CudaClock("cpu")
    contestants = {name: clock.prepare(gpu.work(name, 2.0)) for name in "abc"}
    gpu.log.clear()
    timing.take_turns(contestants)
    assert "".join(name for name, _ in gpu.log[:9]) == "abcbcacab"


def test_what_cannot_be_captured_is_timed_all_the_same_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, capturable=False)
    prepared = timing.CudaClock("cpu").prepare(gpu.work("a", 0.5))
    found = timing.take_turns({"a": prepared})["a"]
    assert not found.graph and found.median_us == pytest.approx(500.0) and found.calls == 2


# ---------------------------------------------------------------------- problems and memory
def test_the_sweep_covers_the_grid_once_and_begins_with_what_matters() -> None:
    problems = list(sweep())
    assert len({p.name for p in problems}) == len(problems)
    names = {p.name for p in problems}
    for model in ("Llama-3-8B", "Qwen3-1.7B"):
        assert {f"prefill {model} 1 x {k * 1024}" for k in (1, 2, 4, 8, 16, 32, 64)} <= names
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            assert {f"decode {model} {batch} x {k * 1024}" for k in (1, 2, 4, 8, 16, 32, 64)} <= names
    first = [p.name for p in problems[:9]]
    assert first[0] == "decode Llama-3-8B 64 x 8192"
    assert {n for n in names if n.startswith("prefill Llama")} <= set(first)


def test_work_is_counted_as_a_reader_would() -> None:
    decode = Problem("decode", LLAMA_3_8B, 64, 8192)
    assert decode.layer_bytes == 64 * 8192 * 2 * 8 * 128 * 2 == 2 << 30
    assert decode.bytes_moved == decode.layer_bytes + 2 * 64 * 32 * 128 * 2
    assert decode.flop == 2 * 2 * 32 * 128 * 64 * 8192
    prefill = Problem("prefill", LLAMA_3_8B, 1, 4)
    assert prefill.flop == 2 * 2 * 32 * 128 * (1 + 2 + 3 + 4)


def test_launches_rotate_over_more_than_a_cache_holds() -> None:
    for problem in sweep():
        rotated = rotated_layers(problem) * problem.layer_bytes
        assert rotated >= 512 << 20 or rotated_layers(problem) == problem.heads.layers
        assert rotated >= 100 << 20, "twice the L2 cache of an H200"


@pytest.mark.parametrize("layout", list(KVLayout))
def test_virtual_rows_follow_the_problems_and_give_everything_back(layout: KVLayout) -> None:
    driver = HostDriver(4096)
    place = VirtualPlace(layout, TINY, driver, 4 << 20, rows=3, max_tokens=64)
    for batch, context in ((2, 40), (3, 8), (1, 64)):
        problem = Problem("decode", TINY, batch, context)
        inputs = place.load(problem)
        place._space.check()
        assert inputs.seq_lens == [context] * batch
        assert place._space.mapped_bytes == place.bytes_for(problem) <= place.held_bytes
        for b in range(batch):
            rows = place.keys_values(1, b)
            assert rows.shape == (2, context, 2, 32) and rows.isfinite().all() and rows.float().std() > 0.5
    place.unload()
    assert place.held_bytes == 0
    place.close()
    driver.close()


class Small(HostDriver):
    """A device with 4 MiB."""

    def memory_info(self) -> tuple[int, int]:
        return 4 << 20, 4 << 20


def test_what_does_not_fit_says_so_and_the_rest_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROTATED_BYTES", 1)  # one layer will do, where strides allow it
    deep = Heads("deep", 4, 2, 32, layers=8)
    driver = Small(4096)
    bench = Bench(torch.device("cpu"), driver, rows=16, max_tokens=256)
    with bench.loaded(Problem("decode", deep, 4, 256)) as places:
        assert all(not isinstance(place, str) for place in places.values()) and len(places) == 6
    with bench.loaded(Problem("decode", deep, 8, 256)) as places:
        refused = {name: place for name, place in places.items() if isinstance(place, str)}
        reason = "does not fit: 4,194,304 bytes, the pool has 2,097,152"
        assert refused == {"virtual interleaved": reason}, "eight layers, where the others have one"
    full = bench.loaded(Problem("decode", deep, 16, 256))
    with pytest.raises(memory.NoRoom, match="5,242,880 bytes in 5 places, 4,"), full:
        pass
    with bench.loaded(Problem("decode", deep, 4, 256)) as places:
        assert not isinstance(places["virtual interleaved"], str), "its memory is back"
    bench.close()
    driver.close()


def test_a_wrong_result_is_noticed() -> None:
    problem = next(dry_sweep())
    driver = HostDriver(4096)
    place = VirtualPlace(KVLayout.PER_LAYER, TINY, driver, 4 << 20, rows=2, max_tokens=64)
    inputs = place.load(problem)
    q = torch.randn(problem.queries, 4, 32, dtype=torch.bfloat16)
    attend = attention.KERNELS["sdpa flash"](problem, inputs, q)
    out = attend(0).reshape(q.shape)
    assert attention.relative_error(problem, place, q, out) < attention.TOLERANCE
    assert attention.relative_error(problem, place, q, attend(1).reshape(q.shape)) > attention.TOLERANCE, (
        "another layer"
    )
    out[-1, -1, -1] = float("nan")
    assert not attention.relative_error(problem, place, q, out) <= attention.TOLERANCE
    place.close()
    driver.close()


def test_the_sanitizer_run_fills_a_page_to_the_last_byte() -> None:
    config = CONFIGS["small"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    shape = KVShape(config["num_hidden_layers"], config["num_key_value_heads"], head_dim, torch.bfloat16)
    stored = PAGE_FULL + OUTPUT_TOKENS - 1  # the last token is never attended to
    assert stored * shape.token_bytes == 2 << 20


# ---------------------------------------------------------------------- records
@pytest.mark.parametrize(
    ("code", "seconds", "result", "status"),
    [
        (0, 5, {"x": 1}, "ok"),
        (0, 5, {"not_available": "no tool"}, "not available"),
        (1, 5, {"not_available": "no tool"}, "failed"),
        (124, 10, None, "timed out"),
        (137, 15, None, "timed out"),
        (137, 3, None, "failed"),
        (-1, 0, None, "not run"),
    ],
)
def test_status_of_a_stage(code: int, seconds: float, result: dict[str, Any] | None, status: str) -> None:
    assert status_of(code, seconds, 10, result) == status


def record(folder: Path, stage: str, *options: str) -> dict[str, Any]:
    """What `benchmarks.gpu.record` writes, given the files `log` and `result` in a folder."""
    files = [f"--log={folder / 'log'}", f"--result={folder / 'result'}", f"--out={folder}", "--limit=10"]
    command = [sys.executable, "-m", "benchmarks.gpu.record", stage, *files, *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    written: dict[str, Any] = json.loads((folder / f"gpu-{stage}.json").read_text())
    return written


def test_a_stage_that_was_ended_keeps_its_figures_and_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100_000)))
    (tmp_path / "result").write_text('{"runs": [1]}')
    found = record(tmp_path, "engine", "--code=124", "--began=1", "--ended=11.5")
    assert (found["status"], found["seconds"], found["result"]) == ("timed out", 10.5, {"runs": [1]})
    assert found["log_tail"].endswith("line 99999\n") and len(found["log_tail"]) < 50_000


def test_half_a_result_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "result").write_text('{"runs": [')
    found = record(tmp_path, "vmm", "--code=1", "--began=0", "--ended=1")
    assert found["result"] is None and found["unreadable_result"] and found["status"] == "failed"
