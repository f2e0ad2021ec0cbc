"""Decode a GGUF file into a folder that transformers loads in a moment.

Every key and every tensor of the file is accounted for: keys by `gguf_config` and `gguf_tokenizer`,
tensors here. What is neither applied nor known to be idle is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from vattn.errors import ConfigError, UnsupportedModel
from vattn.models.gguf_config import apply_keys, check_kind, stop_ids
from vattn.models.gguf_file import GgufSummary, inspect_gguf
from vattn.models.gguf_rope import TENSORS as ROPE_TENSORS
from vattn.models.gguf_tokenizer import build_tokenizer, unused_keys
from vattn.models.support import check_supported

NOTES = "notes.json"  # in a copy: what its user should hear each time, as a list of sentences

# Biases that a model may have, and the config field that gives it some.
_BIASES = {
    re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias"): "attention_bias",
    re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"): "mlp_bias",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, generation config and float32 weights of `gguf` into the empty `folder`.

    Values are those that transformers decodes, bit for bit. A file whose vocabulary is of a kind we don't
    know is converted without a tokenizer, and `NOTES` says why. Raises UnsupportedModel for a model,
    a key or a tensor that cannot be applied, before any weight is decoded, ConfigError if transformers
    cannot read the file or weights are missing, OSError if the folder cannot be written.
    """
    summary = inspect_gguf(gguf)
    try:
        # The decoder draws a progress bar whatever transformers' settings say.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            model = _decode(summary)
    except (UnsupportedModel, ConfigError) as why:
        raise type(why)(f"{gguf}: {why}") from why.__cause__
    except Exception as why:  # transformers lets through whatever its parsing ran into
        kind = UnsupportedModel if "not supported" in str(why) else ConfigError
        raise kind(f"transformers cannot read {gguf}: {str(why) or type(why).__name__}") from why
    try:
        model.save_pretrained(folder)
    except SafetensorError as why:  # its own type for what the file system said
        raise OSError(str(why)) from why
    notes = [f"it does not use {key}={value!r}" for key, value in unused_keys(summary.fields)]
    try:
        build_tokenizer(summary.fields).save_pretrained(folder)
    except (UnsupportedModel, ConfigError) as why:
        notes.append(
            f"it has no usable tokenizer, so prompts must be token ids or tokenizer= be given: {why}"
        )
    (folder / NOTES).write_text(json.dumps(notes, indent=1))


def _decode(summary: GgufSummary) -> Any:
    """The float32 model in a file."""
    # Not at the top: a release of transformers without these functions still loads other models.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = summary.path
    check_kind(summary)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    try:
        rope = apply_keys(config, summary)
    except UnsupportedModel:
        check_supported(config)  # what the whole architecture does says more than one of its keys
        raise
    for pattern, field in _BIASES.items():
        if hasattr(config, field) and any(pattern.fullmatch(name) for name in summary.tensors):
            setattr(config, field, True)
    check_supported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rope.check(model, config)
    _refuse_unknown_tensors(model, config, summary)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(_complete(model, weights), strict=False, assign=True)
    model.tie_weights()
    if stops := stop_ids(config, summary):
        model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
    return model


def _refuse_unknown_tensors(model: Any, config: Any, summary: GgufSummary) -> None:
    """Raise UnsupportedModel for a tensor that neither transformers' decoder nor we put anywhere."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(summary.architecture, TensorProcessor)(config=config.to_dict())
    known = get_gguf_hf_weights_map(model, processor).keys() | ROPE_TENSORS
    if not getattr(config, "tie_word_embeddings", False):
        known |= {"output.weight"}
    unknown = [n for n in summary.tensors if n not in known and n.removesuffix(".weight") not in known]
    if unknown:
        raise UnsupportedModel(
            f"{config.model_type} in transformers has no place for {len(unknown)} of its "
            f"{len(summary.tensors)} tensors, such as {', '.join(unknown[:4])}"
        )


def _complete(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` as float32, with zeros for biases the file leaves out: to have none is to add nothing.

    Raises ConfigError if any other weight is missing, or one has the wrong shape.
    """
    complete = {}
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    )
    for name, parameter in model.state_dict().items():
        if name in weights:
            complete[name] = weights[name].float()
        elif name.endswith(".bias"):
            complete[name] = torch.zeros(parameter.shape)
        elif name not in tied:
            raise ConfigError(f"it lacks the weight {name}")
        if name in complete and complete[name].shape != parameter.shape:
            raise ConfigError(
                f"it has {name} in the shape {tuple(complete[name].shape)}, not {tuple(parameter.shape)}"
            )
    return complete
