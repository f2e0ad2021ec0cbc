"""What transformers' own tests ask of a cache, asked of `VirtualCache`, and how models and pipelines use it.

After `tests/utils/test_cache_utils.py` and `tests/generation` of transformers.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from tests.hf.models import CACHE_ARGUMENT, forward, generate, model, prompts
from vattn import VirtualCache

GREEDY = {"do_sample": False, "max_new_tokens": 10}


def states(*values: float) -> torch.Tensor:
    """States of one sequence, head and dimension."""
    return torch.tensor(values)[None, None, :, None]


class TestNumbers:
    """SyntheticCacheTest: states one number wide."""

    def cache(self, kind: str, window: int = 4) -> VirtualCache:
        from transformers import Gemma2Config

        return VirtualCache(
            Gemma2Config(
                num_hidden_layers=1,
                num_key_value_heads=1,
                num_attention_heads=1,
                head_dim=1,
                hidden_size=1,
                sliding_window=window,
                layer_types=[kind],
            )
        )

    def numbers(self, tensor: torch.Tensor) -> list[float]:
        return list(tensor[0, 0, :, 0].tolist())

    def test_a_full_layer_keeps_all(self) -> None:
        cache = self.cache("full_attention")
        cache.update(states(1.0, 2.0), states(1.0, 2.0), 0)
        keys, values = cache.update(states(3.0), states(-3.0), 0)
        assert self.numbers(keys) == self.numbers(cache.layers[0].keys) == [1.0, 2.0, 3.0]
        assert self.numbers(values) == self.numbers(cache.layers[0].values) == [1.0, 2.0, -3.0]

    def test_a_sliding_layer_returns_the_window_and_keeps_one_less(self) -> None:
        cache = self.cache("sliding_attention")
        cache.update(states(1.0, 2.0), states(1.0, 2.0), 0)
        assert self.numbers(cache.layers[0].keys) == [1.0, 2.0]
        cache.update(states(3.0), states(3.0), 0)
        cache.update(states(4.0), states(4.0), 0)
        keys, _ = cache.update(states(5.0), states(5.0), 0)
        assert self.numbers(keys) == [2.0, 3.0, 4.0, 5.0]
        assert self.numbers(cache.layers[0].keys) == [3.0, 4.0, 5.0]

    def test_a_prompt_longer_than_the_window_is_returned_whole(self) -> None:
        cache = self.cache("sliding_attention")
        keys, _ = cache.update(states(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), states(*[0.0] * 6), 0)
        assert self.numbers(keys) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert self.numbers(cache.layers[0].keys) == [4.0, 5.0, 6.0]
        assert cache.get_seq_length() == 6
        keys, _ = cache.update(states(7.0, 8.0), states(0.0, 0.0), 0)
        assert self.numbers(keys) == [4.0, 5.0, 6.0, 7.0, 8.0]

    def test_a_full_window_is_not_cropped_unless_the_past_was_recorded(self) -> None:
        cache = self.cache("sliding_attention")
        cache.update(states(1.0, 2.0, 3.0), states(0.0, 0.0, 0.0), 0)
        cache.crop(-1)
        assert self.numbers(cache.layers[0].keys) == [1.0, 2.0]
        cache.update(states(3.0, 4.0), states(0.0, 0.0), 0)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        assert cache.layers[0].record_past
        cache.update(states(5.0, 6.0), states(0.0, 0.0), 0)
        with pytest.raises(RuntimeError, match="negative"):
            cache.crop(3)
        cache.crop(-2)
        assert self.numbers(cache.layers[0].keys) == [2.0, 3.0, 4.0]
        assert cache.get_seq_length() == 4


class TestAnswers:
    """The questions transformers asks have the answers of `DynamicCache`."""

    def test_before_and_after_the_first_token(self) -> None:
        config = model("llama").config
        ours, theirs = VirtualCache(config), DynamicCache(config=config)
        for step in range(2):
            for name in ("is_compileable", "is_initialized", "is_sliding", "is_linear", "is_croppable"):
                if hasattr(theirs, name):
                    assert getattr(ours, name) == getattr(theirs, name), name
            assert len(ours) == len(theirs) == config.num_hidden_layers
            assert ours.get_seq_length() == theirs.get_seq_length() == 4 * step
            assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
            for layer in range(config.num_hidden_layers):
                for cache in (ours, theirs):
                    cache.update(torch.ones(2, 2, 4, 16), torch.ones(2, 2, 4, 16), layer)
        assert ours.batch_size == 2
        assert ours.get_max_length() == config.max_position_embeddings

    def test_iteration_gives_the_states_of_every_layer(self) -> None:
        config = model("gemma2-sliding").config
        ours, theirs = VirtualCache(config), DynamicCache(config=config)
        for cache in (ours, theirs):
            forward(model("gemma2-sliding"), prompts(2, 20)["input_ids"], cache)
        for left, right in zip(ours, theirs, strict=True):
            for mine, other in zip(left, right, strict=True):
                assert (mine is None and other is None) or torch.equal(mine, other)

    def test_early_initialization_reserves_and_takes_no_memory(self) -> None:
        cache = VirtualCache(model("llama").config)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        assert cache.is_initialized and cache.nbytes_reserved and not cache.nbytes_mapped
        assert cache.layers[0].keys.shape == (2, 2, 0, 16)
        inputs = prompts(2, 9, padding=2)
        expected = generate(model("llama"), inputs, DynamicCache(config=model("llama").config), **GREEDY)
        assert torch.equal(generate(model("llama"), inputs, cache, **GREEDY), expected)

    def test_layers_may_differ_in_heads_and_dims_and_values_from_keys(self) -> None:
        for layout in ("heads", "tokens"):
            ours, theirs = VirtualCache(max_len=64, layout=layout), DynamicCache()  # type: ignore[arg-type]
            for layer, (heads, key_dim, value_dim) in enumerate([(2, 24, 16), (1, 8, 40), (3, 5, 7)]):
                for tokens in (7, 1, 1):
                    keys = torch.randn(2, heads, tokens, key_dim)
                    values = torch.randn(2, heads, tokens, value_dim).to(torch.bfloat16)
                    got, expected = (each.update(keys, values, layer) for each in (ours, theirs))
                    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
                    assert got[1].dtype is torch.bfloat16
            ours.check()


class TestCopies:
    def test_a_prompt_is_computed_once_and_copied_for_every_question(self) -> None:
        target, ids = model("qwen3"), prompts(1, 12)["input_ids"]
        prompt = VirtualCache(target.config)
        forward(target, ids, prompt)
        questions = [torch.cat([ids, prompts(1, 5, seed=seed)["input_ids"]], 1) for seed in (1, 2, 3)]
        for question in questions:
            inputs = {"input_ids": question, "attention_mask": torch.ones_like(question)}
            answer = generate(target, inputs, copy.deepcopy(prompt), **GREEDY)
            assert torch.equal(answer, generate(target, inputs, DynamicCache(config=target.config), **GREEDY))
        assert prompt.get_seq_length() == 12

    @pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_shares_nothing(self, name: str, how: str) -> None:
        target, ids = model(name), prompts(2, 30)["input_ids"]
        cache = VirtualCache(target.config)
        forward(target, ids, cache)
        copied = copy.deepcopy(cache) if how == "deepcopy" else pickle.loads(pickle.dumps(cache))
        kept = [layer.keys.clone() for layer in cache.layers]
        assert copied.nbytes == cache.nbytes and copied.max_len == cache.max_len
        for mine, other in zip(copied.layers, cache.layers, strict=True):
            assert torch.equal(mine.values, other.values)
            assert mine.keys.data_ptr() != other.keys.data_ptr()
        cache.reset()
        forward(target, ids[:, :5], cache)
        assert all(torch.equal(layer.keys, states) for layer, states in zip(copied.layers, kept, strict=True))
        copied.check()

    def test_an_empty_cache_is_copied_too(self) -> None:
        copied = pickle.loads(pickle.dumps(copy.deepcopy(VirtualCache(model("llama").config))))
        assert generate(model("llama"), prompts(1, 5), copied, **GREEDY).shape == (1, 15)

    def test_the_file_is_as_large_as_the_tokens(self, tmp_path: Path) -> None:
        cache = VirtualCache(max_len=1 << 20)
        cache.update(torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16), 0)
        assert len(pickle.dumps(cache)) < cache.nbytes + 10_000
        torch.save(cache, tmp_path / "cache.pt")
        loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
        assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)


class TestDecoding:
    def test_beams_are_reordered(self) -> None:
        target, inputs = model("qwen2"), prompts(1, 6)
        options = {**GREEDY, "num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
        out = generate(target, inputs, VirtualCache(target.config), **options)
        assert any(len(set(row.tolist())) > 1 for row in out.beam_indices)
        assert isinstance(out[CACHE_ARGUMENT], VirtualCache)

    def test_padding_on_the_left_changes_nothing(self) -> None:
        target, inputs = model("llama"), prompts(1, 6)
        padded = {
            key: torch.nn.functional.pad(value, (5, 0)) for key, value in inputs.items()
        }  # ids and mask: 0
        plain = generate(target, inputs, VirtualCache(target.config), **GREEDY)[:, 6:]
        assert torch.equal(generate(target, padded, VirtualCache(target.config), **GREEDY)[:, 11:], plain)

    @pytest.mark.parametrize("name", ["llama", "llama_d24", "gemma2-sliding"])
    def test_candidates_are_repeated_selected_and_cropped(self, name: str) -> None:
        # What contrastive search, which transformers moved to the Hub, does at every step.
        target, ids = model(name), prompts(2, 5)["input_ids"]
        config = target.config
        answers = []
        for cache in (VirtualCache(config), DynamicCache(config=config)):
            forward(target, ids, cache)
            cache.batch_repeat_interleave(3)
            forward(target, torch.arange(3, 9)[:, None], cache)
            cache.crop(-1)
            cache.batch_select_indices(torch.tensor([1, 5]))
            answers.append(forward(target, torch.tensor([[4], [5]]), cache))
            cache.batch_select_indices(torch.tensor([False, True]))
            answers.append(forward(target, torch.tensor([[4]]), cache))
        assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])

    def test_inference_mode_and_after_it(self) -> None:
        target, ids = model("llama"), prompts(1, 9)["input_ids"]
        cache = VirtualCache(target.config)
        with torch.inference_mode():
            target(ids[:, :4], **{CACHE_ARGUMENT: cache})
        forward(target, ids[:, 4:6], cache)
        with torch.inference_mode():
            target(ids[:, 6:8], **{CACHE_ARGUMENT: cache})
        logits = forward(target, ids[:, 8:], cache)
        torch.testing.assert_close(logits, target(ids, use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-4)

    def test_a_pipeline(self) -> None:
        words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "the", "cat", "sat"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
        pipe = pipeline("text-generation", model=model("llama"), tokenizer=fast, device="cpu")
        config = model("llama").config
        texts = [
            pipe("the cat sat", return_tensors=True, **{CACHE_ARGUMENT: cache}, **GREEDY)
            for cache in (VirtualCache(config), DynamicCache(config=config))
        ]
        assert texts[0] == texts[1] and len(texts[0][0]["generated_token_ids"]) > 3

    @pytest.mark.parametrize("beams", [1, 3])
    def test_an_encoder_and_a_decoder(self, beams: int) -> None:
        config = T5Config(vocab_size=160, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        config.decoder_start_token_id = 0
        torch.manual_seed(0)
        target, inputs = T5ForConditionalGeneration(config).eval(), prompts(2, 9, padding=3)

        def tokens(make: Any) -> Any:
            return generate(target, inputs, EncoderDecoderCache(make(), make()), num_beams=beams, **GREEDY)

        expected = tokens(lambda: DynamicCache(config=config))
        assert torch.equal(tokens(lambda: VirtualCache(config, max_len=64)), expected)


class TestAttention:
    @pytest.mark.parametrize("layout", ["heads", "tokens"])
    @pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
    def test_every_implementation_reads_the_views(self, implementation: str, layout: Any) -> None:
        target, inputs = copy.deepcopy(model("qwen3")), prompts(2, 9, padding=3)
        target.set_attn_implementation(implementation)
        # FlexAttention compiles itself, for minutes on a CPU; what it computes is the same without.
        with torch.compiler.set_stance("force_eager"):
            expected = generate(target, inputs, DynamicCache(config=target.config), **GREEDY)
            got = generate(target, inputs, VirtualCache(target.config, layout=layout), **GREEDY)
        assert torch.equal(got, expected)

    @pytest.mark.parametrize("layout", ["heads", "tokens"])
    def test_strides_are_what_kernels_take(self, layout: Any) -> None:
        cache = VirtualCache(max_len=1000, layout=layout)
        keys, values = cache.update(torch.randn(2, 3, 70, 64), torch.randn(2, 3, 70, 64), 0)
        for view in (keys, values, keys.transpose(1, 2), values.transpose(1, 2)):  # SDPA's and flash-attn's
            assert view.stride(-1) == 1
            assert all(step % 4 == 0 for step in view.stride()[:-1]) and view.data_ptr() % 16 == 0
        if layout == "heads":
            assert keys.stride(2) == 64  # dense: what a tensor of this head alone would have


def test_a_compiled_model_leaves_its_graph_to_append() -> None:
    # Dynamo's graphs, run as they are: code generation is not the point.
    config = copy.deepcopy(model("llama_mqa").config)
    config.num_hidden_layers = 1
    target, ids = LlamaForCausalLM(config).eval(), prompts(1, 6)["input_ids"]
    torch._dynamo.reset()
    step = torch.compile(target.forward, backend="eager")
    eager, compiled = VirtualCache(config), VirtualCache(config)
    with torch.no_grad():
        for part in (ids, *torch.arange(3, 8).view(5, 1, 1)):
            logits = step(input_ids=part, **{CACHE_ARGUMENT: compiled}).logits
            torch.testing.assert_close(logits, forward(target, part, eager), rtol=1e-5, atol=1e-5)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(5):
            step(input_ids=ids[:, :1], **{CACHE_ARGUMENT: compiled})
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # not anew for every token
    torch._dynamo.reset()


def test_config_is_optional() -> None:
    cache = VirtualCache(max_len=32)
    target = model("llama")
    expected = forward(target, prompts(1, 5)["input_ids"], DynamicCache())
    assert torch.equal(forward(target, prompts(1, 5)["input_ids"], cache), expected)
    assert len(cache) == target.config.num_hidden_layers


def test_the_name_is_there_without_loading_transformers() -> None:
    import subprocess
    import sys

    code = "import sys, vattn; 'VirtualCache' in dir(vattn) or exit(1); exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert VirtualCache(LlamaConfig()).max_len == 2048
