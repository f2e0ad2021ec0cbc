"""The demo model, from the file inside its package to the first sentence."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from vattn.models.loader import LoadedModel, load_model
from vattn.models.sources import Gguf, find_model
from vattn.models.spec import ModelSpec

pytestmark = pytest.mark.smollm2

PROMPT = "The capital of France is"
TEXTS = [
    "Hello  world",
    " leading",
    "line\nbreaks\tand tabs",
    "1234 + 56.7",
    "\n\n1. one\n\n2. two\n 3",
    "x1y22 ²³ ٣٤",
    "naïve ☕ 東京",
    "a<|im_end|>b",
    "",
]


@cache
def demo(prepare: bool = True) -> LoadedModel:
    return load_model("smollm2", device="cpu", attn_implementation="sdpa", prepare=prepare)


def demo_file() -> Gguf:
    found = find_model("smollm2")
    assert isinstance(found, Gguf)
    return found


def test_what_it_is() -> None:
    loaded = demo()
    assert loaded.spec == ModelSpec(
        model_type="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_model_len=8192,
        dtype_name="float32",
        intermediate_size=1536,
        tied=True,
    )
    assert loaded.eos_token_ids == {2}
    assert loaded.generation_config.eos_token_id == 2
    assert loaded.config.tie_word_embeddings


def test_weights_are_the_files() -> None:
    reader = gguf.GGUFReader(demo_file().path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = demo(prepare=False).model.state_dict()
    for name, gguf_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        tensor = stored[gguf_name]
        decoded = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(weights[name], decoded.reshape(weights[name].shape)), name


def test_the_tokenizer_is_the_one_the_model_was_trained_with() -> None:
    """SmolLM2 takes each digit alone, then cuts as GPT-2 does. transformers reads its vocabulary rightly."""
    path = demo_file().path
    published = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    published.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = demo().tokenizer
    assert tokenizer.get_vocab() == published.get_vocab()
    for text in TEXTS:
        ids = published(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n1")["input_ids"]) == ["ĊĊ", "1"]
    assert tokenizer.decode([2, *tokenizer("hi")["input_ids"]], skip_special_tokens=True) == "hi"
    assert tokenizer.convert_ids_to_tokens([tokenizer.bos_token_id, tokenizer.eos_token_id]) == [
        "<|im_start|>",
        "<|im_end|>",
    ]


@torch.inference_mode()
def test_a_numbered_list_is_likelier_than_with_gpt_2s_pieces() -> None:
    text = "\n\n1. Apples\n\n2. Pears\n\n3. Plums\n\n4. Cherries\n\n5. Quinces"
    loaded = demo()
    by_gpt2 = copy.deepcopy(loaded.tokenizer)
    by_gpt2.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def nats(tokenizer: Any) -> float:
        ids = torch.tensor([[0, *tokenizer(text)["input_ids"]]])
        scores = loaded.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return float(scores.gather(1, ids[0, 1:, None]).sum())

    assert nats(loaded.tokenizer) > nats(by_gpt2) + 10


def test_the_chat_template_survives_conversion() -> None:
    assert demo().has_chat_template
    text = demo().tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@torch.inference_mode()
def test_it_knows_the_capital_of_france() -> None:
    loaded = demo()
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(loaded.model(input_ids=ids).logits[0, -1].argmax()) == " Paris"


@torch.inference_mode()
def test_prepared_layers_give_its_logits() -> None:
    ids = torch.arange(100, 140)[None]
    for rows in (1, 8, 40):
        expected = demo(prepare=False).model(input_ids=ids[:, :rows]).logits
        actual = demo().model(input_ids=ids[:, :rows]).logits
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
