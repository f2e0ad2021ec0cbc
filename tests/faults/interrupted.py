"""A child process: `LLM.generate` in the main thread, interrupted again and again at random moments.

Prints one line at the end; any traceback is a failure.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import torch

from tests.engine.engines import make_llm, random_prompts
from tests.faults.busy import MAX_LEN, NAME, greedy


def main(backend: str, rounds: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(7)
    prompts = random_prompts(9, [20, 9, 14, 5], 100)
    options = {"max_model_len": MAX_LEN, "kv_cache_memory_bytes": 64 << 10}
    with make_llm(NAME, backend, preemption="swap", swap_space_bytes=1 << 20, **options) as llm:
        started = time.perf_counter()
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(20), use_tqdm=False)]
        seconds = time.perf_counter() - started
        interrupted = 0
        for _ in range(rounds):
            timer = threading.Timer(rng.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                got = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(20), use_tqdm=False)]
                assert got == expected
                timer.join()
                time.sleep(0.01)  # a late one
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            llm.check()
            assert not llm.engine.has_work, "a request was left behind"
            assert llm.memory_usage().in_use == 0
        stream = llm.stream(prompts[0], greedy(20))
        assert [len(o.outputs[0].token_ids) for o in stream][-1] == 20
        again = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(20), use_tqdm=False)]
        assert again == expected
    print(f"interrupted {interrupted} of {rounds}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
