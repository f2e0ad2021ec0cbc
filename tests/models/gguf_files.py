"""A tiny llama as a GGUF file, written the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

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


def tiny_llama() -> PreTrainedModel:
    """Two layers with grouped KV heads, as long as the vocabulary above."""
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def write_gguf(path: Path, model: PreTrainedModel, *, quantized: str = "") -> None:
    """Write `model` to `path`; a tensor whose GGUF name contains `quantized` becomes Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(MERGES)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if "q_proj" in name:
            values = _interleave(values, config.num_attention_heads)
        if "k_proj" in name:
            values = _interleave(values, config.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if quantized and quantized in gguf_name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The two halves of each head's rows, alternating: llama.cpp rotates neighbours, not halves."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
