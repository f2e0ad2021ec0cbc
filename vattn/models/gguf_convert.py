"""Decode a GGUF file into a folder that transformers loads in a moment."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from vattn.errors import ConfigError, UnsupportedModel, VattnError
from vattn.models.gguf_file import inspect_gguf
from vattn.models.gguf_tokenizer import build_tokenizer, unused_keys
from vattn.models.support import check_supported

NOTES = "notes.json"  # in a copy: what its user should hear each time, as a list of sentences


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, generation config and float32 weights of `gguf` into the empty `folder`.

    Values are those that transformers decodes, bit for bit. A file whose vocabulary is of a kind we don't
    know is converted without a tokenizer, and `NOTES` says why. Raises UnsupportedModel before any weight
    is decoded, ConfigError if transformers cannot read the file, OSError if the folder cannot be written.
    """
    fields = inspect_gguf(gguf).fields
    model = _decode(gguf)
    # A model that came from GGUF counts as quantised, and transformers refuses to save it. The same
    # weights under the plain config are just weights.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    try:
        plain.save_pretrained(folder)
    except SafetensorError as why:  # its own type for what the file system said
        raise OSError(str(why)) from why
    notes = [f"it does not use {key}={value!r}" for key, value in unused_keys(fields)]
    try:
        build_tokenizer(fields).save_pretrained(folder)
    except (UnsupportedModel, ConfigError) as why:
        notes.append(
            f"it has no usable tokenizer, so prompts must be token ids or tokenizer= be given: {why}"
        )
    (folder / NOTES).write_text(json.dumps(notes, indent=1))


def _decode(gguf: Path) -> Any:
    """The float32 model in a file."""
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    try:
        # The decoder draws a progress bar whatever transformers' settings say.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            check_supported(AutoConfig.from_pretrained(**source))
            return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except VattnError:
        raise
    except Exception as why:  # transformers lets through whatever its parsing ran into
        kind = UnsupportedModel if "not supported" in str(why) else ConfigError
        raise kind(f"transformers cannot read {gguf}: {str(why) or type(why).__name__}") from why
