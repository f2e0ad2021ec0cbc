"""The options of `vattn simulate`: from words to configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from vattn.commands.options import parse_bytes
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.errors import ConfigError
from vattn.lab.simulator.calibrate import Fit
from vattn.lab.simulator.cost import CallSeconds, Efficiency
from vattn.lab.simulator.gpus import find_gpu
from vattn.lab.simulator.known_models import find_model
from vattn.lab.simulator.setup import SimulationConfig
from vattn.lab.simulator.sweep import ASSUMPTIONS

Choices = Mapping[str, Any]


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["block_size=8,16", "tp=2,4"]`. Raises ConfigError."""
    swept: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        name = {"backends": "backend", "kv_backend": "backend"}.get(name, name)
        parts = [value.strip() for value in values.split(",") if value.strip()]
        if not parts or name in swept or len(set(parts)) < len(parts):
            raise ConfigError(f"--sweep {text!r}: write a name once and its values, e.g. block_size=8,16,32")
        swept[name] = parts
    return swept


def parse_assumptions(texts: Sequence[str]) -> dict[str, str]:
    """`["linear_flops=0.5", "map_seconds=3e-6"]`. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ASSUMPTIONS or not value:
            raise ConfigError(f"--assume {text!r}: write NAME=VALUE; names: {', '.join(sorted(ASSUMPTIONS))}")
        found[name] = value
    return found


def configure(choices: Choices, fit: Fit | None = None) -> SimulationConfig:
    """The configuration that choices name. Raises ConfigError for a value that is none."""

    def whole(name: str) -> int | None:
        value = choices.get(name)
        if value is None or isinstance(value, int):
            return value
        if not str(value).isdecimal():
            raise ConfigError(f"{name}={value!r} is not a whole number")
        return int(value)

    def number(name: str, value: Any) -> float:
        try:
            return float(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} is not a number") from error

    def yes(name: str, true: str, false: str, default: bool) -> bool:
        value = str(choices.get(name, true if default else false)).lower()
        if value not in (true, false):
            raise ConfigError(f"{name}={value!r}: use {true} or {false}")
        return value == true

    assumed = {n: number(n, choices[n]) for n in ASSUMPTIONS if n in choices}
    caching = choices.get("prefix_caching", "auto") if choices["backend"] != "static" else "auto"
    kv = KVCacheConfig(
        backend=choices["backend"],
        layout=choices.get("kv_layout") or "auto",
        page_bytes=parse_bytes(_text(choices.get("page_bytes")), "page_bytes"),
        block_size=whole("block_size") or 16,
        memory_bytes=parse_bytes(_text(choices.get("kv_memory")), "kv_memory"),
        gpu_memory_utilization=number("gpu_memory_utilization", choices.get("gpu_memory_utilization", 0.9)),
        dtype=choices.get("kv_cache_dtype") or "auto",
        prefix_caching=None if caching == "auto" else yes("prefix_caching", "true", "false", True),
    )
    prices = {f.name: assumed.pop(f"{f.name}_seconds", None) for f in fields(CallSeconds)}
    return SimulationConfig(
        find_model(choices["model"]),
        find_gpu(choices["gpu"]),
        tp=whole("tp"),
        kv=kv,
        limits=SchedulerConfig(whole("max_num_seqs") or 256, whole("max_num_batched_tokens") or 2048),
        max_model_len=whole("max_model_len"),
        weight_dtype=choices.get("weight_dtype") or "bfloat16",
        hidden_mapping=yes("mapping", "hidden", "exposed", True),
        overlap=yes("overlap", "true", "false", True),
        efficiency=Efficiency(**assumed),
        call_seconds=replace(CallSeconds(), **{k: v for k, v in prices.items() if v is not None}),
        fit=fit,
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
