"""A tiny model that reads and writes text: byte-level tokens, a chat template."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.models.tiny import TINY, randomize
from vattn import LLM
from vattn.models.loader import LoadedModel, load_model

VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('this template knows no role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level() -> Tokenizer:
    """Bytes, a few merges, and a beginning-of-text token in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user and the assistant"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def fast(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def model() -> Any:
    config = TINY["llama"]()
    config.vocab_size = VOCAB
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@lru_cache(maxsize=1)
def loaded() -> LoadedModel:
    return load_model(model(), device="cpu", tokenizer=fast())


def make_llm(**options: Any) -> LLM:
    return LLM(loaded(), **{"kv_cache_memory_bytes": 8 << 20, **options})
