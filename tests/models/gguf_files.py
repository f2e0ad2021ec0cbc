"""Tiny models as GGUF files, written the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.models.tiny import randomize

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]


def vocabulary() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's spelling, and what `MERGES` make of them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    return SPECIAL + letters + [merge.replace(" ", "") for merge in MERGES]


def tiny_llama(**fields: Any) -> PreTrainedModel:
    """Two layers with grouped KV heads, with a token for each of the vocabulary above."""
    defaults = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = LlamaConfig(**{**defaults, **fields})
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def sentencepiece() -> dict[str, Any]:
    """The keys of a vocabulary in SentencePiece's spelling, as long as the one above: merges by score."""
    words = ["▁", *"helowrd", "he", "ll", "hell", "hello", "▁w", "or", "▁wor", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(128)), *words]
    tokens = (tokens + [f"<filler{index}>" for index in range(len(vocabulary()))])[: len(vocabulary())]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 128 + [gguf.TokenType.NORMAL] * (len(tokens) - 131)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.unknown_token_id": 0,
    } | dict.fromkeys(
        ("tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.padding_token_id"), None
    )


def keys_of(model: PreTrainedModel, arch: str = "llama") -> dict[str, Any]:
    """What llama.cpp's converter writes of a model, and a byte-level vocabulary if there is room for one."""
    config = model.config
    rms = getattr(config, "rms_norm_eps", None)
    sizes = {
        "general.name": "tiny",
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": rms,
        f"{arch}.attention.layer_norm_epsilon": None if rms else config.norm_epsilon,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim(model),
        f"{arch}.vocab_size": config.vocab_size,
    }
    if config.vocab_size != len(vocabulary()):
        return {**sizes, "tokenizer.ggml.model": "none"}
    tokens = vocabulary()
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    return {
        **sizes,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [control] * 3 + [normal] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def head_dim(model: PreTrainedModel) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str = "llama",
    quantized: str = "",
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """Write `model` to `path`; a tensor whose GGUF name contains `quantized` becomes Q8_0.

    `keys` and `tensors` replace or add what is written by default; None leaves out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**keys_of(model, arch), **(keys or {})}.items():
        _add_key(writer, key, value)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    permuted = arch == "llama"
    written: dict[str, np.ndarray | None] = {}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if permuted and "q_proj" in name:
            values = _interleave(values, config.num_attention_heads)
        if permuted and "k_proj" in name:
            values = _interleave(values, config.num_key_value_heads)
        written[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, values in {**written, **(tensors or {})}.items():
        if values is None:
            continue
        if quantized and quantized in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The two halves of each head's rows, alternating: llama.cpp rotates neighbours, not halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
