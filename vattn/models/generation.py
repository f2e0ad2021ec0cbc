"""Sampling parameters that a model recommends: the defaults of requests that bring none, as in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vattn.checks import shown
from vattn.errors import ConfigError, RequestError
from vattn.params import SamplingParams

FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What is taken from a generation config, and what it is called here. `do_sample` and the rest are not."""


def default_sampling(source: str | Path, own: Any) -> SamplingParams:
    """Default parameters from `source`: `"auto"` (the model's `own` generation config), `"vllm"` (none
    but those of SamplingParams), or a folder with a generation_config.json.

    Raises ConfigError.
    """
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"generation_config must be 'auto', 'vllm' or a folder, got {shown(source)}")
    if source == "vllm":
        return SamplingParams()
    config = own if source == "auto" else _read(source)
    changed = {} if config is None else config.to_diff_dict()
    wanted = {ours: changed[name] for name, ours in FIELDS.items() if changed.get(name) is not None}
    try:
        return SamplingParams(**wanted)
    except RequestError as why:
        raise ConfigError(
            f"the generation config of generation_config={str(source)!r} can't be used: {why}; "
            "generation_config='vllm' does without it"
        ) from why


def _read(folder: str | Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(Path(folder), local_files_only=True)
    except Exception as why:
        raise ConfigError(
            f"generation_config={str(folder)!r} is neither 'auto' nor 'vllm' nor a folder with a "
            f"generation_config.json: {(str(why).strip().splitlines() or [type(why).__name__])[0]}"
        ) from why
