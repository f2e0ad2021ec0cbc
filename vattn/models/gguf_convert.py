"""Decode a GGUF file into a folder that transformers loads in a moment."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vattn.errors import ConfigError, UnsupportedModel, VattnError
from vattn.models.gguf_file import inspect_gguf
from vattn.models.support import check_supported


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, generation config and float32 weights of `gguf` into the empty `folder`.

    Values are those that transformers decodes, bit for bit. Raises UnsupportedModel before any weight is
    decoded, ConfigError if transformers cannot read the file, OSError if the folder cannot be written.
    """
    model, tokenizer = _decode(gguf)
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
    _name_special_tokens(tokenizer, inspect_gguf(gguf).fields)
    tokenizer.clean_up_tokenization_spaces = False  # meant for WordPiece; 5.17 warns at each load
    tokenizer.save_pretrained(folder)


def _name_special_tokens(tokenizer: Any, fields: dict[str, Any]) -> None:
    """Take special tokens from the file: transformers 5.17 takes the first token for the last."""
    for role, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = fields.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None and token_id < len(tokenizer):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))


def _decode(gguf: Path) -> tuple[Any, Any]:
    """The float32 model and the tokenizer in a file."""
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    try:
        # The decoder draws a progress bar whatever transformers' settings say.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            check_supported(AutoConfig.from_pretrained(**source))
            tokenizer = AutoTokenizer.from_pretrained(**source)
            return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), tokenizer
    except VattnError:
        raise
    except Exception as why:  # transformers lets through whatever its parsing ran into
        kind = UnsupportedModel if "not supported" in str(why) else ConfigError
        raise kind(f"transformers cannot read {gguf}: {str(why) or type(why).__name__}") from why
