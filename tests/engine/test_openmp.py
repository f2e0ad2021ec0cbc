"""The thread that made an engine keeps no OpenMP workers: they would slow down those of the engine."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os, torch
from tests.engine.engines import make_llm
from vattn import SamplingParams
threads = lambda: len(os.listdir("/proc/self/task"))
work = lambda: torch.randn(600, 600) @ torch.randn(600, 600) + torch.randn(1 << 20).exp().sum()
torch.set_num_threads(3)
alone = threads()
work()
busy = threads()
with make_llm("llama", "static-interleaved", max_model_len=64) as llm:
    made = threads()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [first] = llm.generate([1, 2, 3], params, use_tqdm=False)
    work()  # they come back when they are needed
    [second] = llm.generate([1, 2, 3], params, use_tqdm=False)
assert first.outputs[0].token_ids == second.outputs[0].token_ids
print(busy - alone, made - alone)
"""


def test_the_thread_that_made_an_engine_keeps_no_workers() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    workers, left = map(int, done.stdout.split())
    assert workers >= 2, "there was nothing to let go"
    assert left == 1, "only the engine's own thread is there"
