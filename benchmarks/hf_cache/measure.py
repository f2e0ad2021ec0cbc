"""Time per token and peak memory of one cache at one context length."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from caches import CACHE_ARGUMENT, fill, states
from transformers import LlamaConfig, LlamaForCausalLM


def cache_time(make: Callable[[], Any], config: LlamaConfig, context: int, steps: int) -> tuple[float, float]:
    """Seconds to put a prompt of `context` tokens into all layers, and one token more (median of `steps`)."""
    cache, prompt = make(), states(config, context)
    start = time.perf_counter()
    fill(cache, config, prompt)
    prompt_s = time.perf_counter() - start
    token = states(config, 1)
    fill(cache, config, token)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        fill(cache, config, token)
        times.append(time.perf_counter() - start)
    return prompt_s, statistics.median(times)


def model_time(model: LlamaForCausalLM, make: Callable[[], Any], context: int, steps: int) -> float:
    """Median seconds of a decoding step of the whole model behind `context` tokens."""
    cache = make()
    fill(cache, model.config, states(model.config, context))
    ids = torch.ones(1, 1, dtype=torch.long)
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        model(ids, **{CACHE_ARGUMENT: cache})
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def peak_memory(make: Callable[[], Any], config: LlamaConfig, context: int, steps: int) -> dict[str, int]:
    """Bytes by which a process of its own grows, at most, from an empty cache to `context` tokens and one.

    The one makes every page a new one, the worst case. The last `steps` tokens are appended one by one.
    Only the cache is there, no model. `held` is what remains when the last token is in. For a VirtualCache
    `mapped` is what it says itself.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_peak, args=(writer, make, config, context, steps)
    )
    child.start()
    writer.close()
    result: dict[str, int] = reader.recv()
    child.join()
    return result


def _peak(writer: Any, make: Callable[[], Any], config: LlamaConfig, context: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    mallopt = ctypes.CDLL(None).mallopt  # every block over 64 KiB is a mapping: freed means given back
    mallopt(-3, 64 << 10)
    mallopt(-1, 0)
    prompt, token = states(config, context + 1 - steps), states(config, 1)
    fill(make(), config, prompt[:, :, :32])  # code and buffers that are made once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    cache = make()
    fill(cache, config, prompt)
    for _ in range(steps):
        fill(cache, config, token)
    result = {"peak": _status("VmHWM") - before, "held": _status("VmRSS") - before}
    if hasattr(cache, "nbytes_mapped"):
        cache.check()
        result |= {"mapped": cache.nbytes_mapped, "used": cache.nbytes}
    writer.send(result)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
