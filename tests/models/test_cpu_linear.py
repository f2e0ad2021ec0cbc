"""Linear layers rebuilt for CPU: the same numbers, fewer products, no second copy of the weights."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.models.tiny import MORE, TINY, VOCAB, build
from vattn.models.cpu_linear import MIN_PACKED_ROWS, PackedLinear, SliceLinear, prepare_for_cpu
from vattn.models.cpu_norm import FusedRMSNorm, fuse_norms

ALL = {**TINY, **MORE}
ROWS = (1, 3, MIN_PACKED_ROWS, 33)


def logits(model: nn.Module, rows: int) -> Tensor:
    ids = torch.arange(3, 3 + rows)[None] % VOCAB
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


class Projections(nn.Module):
    """Three projections of one input, as in an attention layer."""

    def __init__(self, *, bias: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias[0])
        self.k_proj = nn.Linear(16, 8, bias=bias[1])
        self.v_proj = nn.Linear(16, 8, bias=bias[2])


def plain(module: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Copies of the weights and biases: what is rebuilt may write over its own."""
    return [(layer.weight.detach().clone(), copied(layer.bias)) for layer in module.children()]


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# ------------------------------------------------------------------ whole models
@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_every_architecture_computes_the_same(name: str) -> None:
    model = build(name)
    expected = [logits(model, rows) for rows in ROWS]
    assert prepare_for_cpu(model) > 0
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    for rows, logits_before in zip(ROWS, expected, strict=True):
        after = logits(model, rows)
        assert (after - logits_before).abs().max() <= 1e-5 * logits_before.abs().max()
        assert torch.equal(logits(model, rows), after), "the same input must give the same bits again"


@pytest.mark.parametrize(("name", "merged"), [("llama", 5), ("qwen2", 5), ("phi3", 0), ("gpt_neox", 0)])
def test_projections_of_one_input_are_merged(name: str, merged: int) -> None:
    """Phi-3 and GPT-NeoX come with theirs in one matrix."""
    model = build(name)
    prepare_for_cpu(model)
    slices = sum(isinstance(module, SliceLinear) for module in model.modules())
    assert slices == merged * model.config.num_hidden_layers


def test_preparing_twice_changes_nothing() -> None:
    model = build("llama")
    prepare_for_cpu(model)
    assert prepare_for_cpu(model) == 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_weights_can_still_be_read(name: str) -> None:
    model = build(name)
    linear = {n: m for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    before = {n: (m.weight.clone(), copied(m.bias)) for n, m in linear.items()}
    assert prepare_for_cpu(model) == len(before) > 0
    for path, (weight, bias) in before.items():
        layer = model.get_submodule(path)
        assert torch.equal(layer.weight, weight.t() if name == "gpt2" and path != "lm_head" else weight)
        assert layer.bias is bias if bias is None else torch.equal(layer.bias, bias)


NORMS = [("llama", 7), ("qwen3", 9), ("olmo2", 9), ("gemma", 5), ("gpt_neox", 0)]


@pytest.mark.parametrize(("name", "norms"), NORMS)
def test_norms_are_fused_where_that_gives_the_same(name: str, norms: int) -> None:
    """Qwen3 and OLMo2 normalise q and k too, Gemma stores weights less one, GPT-NeoX has LayerNorm."""
    model = build(name)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    prepare_for_cpu(model)
    assert sum(isinstance(module, FusedRMSNorm) for module in model.modules()) == norms
    after = model.state_dict()
    assert all(torch.equal(weight, before[key]) for key, weight in after.items())
    assert not [key for key in before.keys() - after.keys() if "norm" in key]


def test_a_norm_that_computes_otherwise_stays() -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.weight, self.eps, self.shift = nn.Parameter(torch.ones(8)), 1e-6, shift

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (8,), self.weight, self.eps) + self.shift

    assert fuse_norms(nn.ModuleList([ShiftedRMSNorm(1e-3)])) == 0
    assert fuse_norms(nn.ModuleList([ShiftedRMSNorm(0.0)])) == 1


# ------------------------------------------------------------------ one product for several layers
def test_slices_of_one_product() -> None:
    module = Projections()
    layers = plain(module)
    x = torch.randn(1, 5, 16)
    expected = [F.linear(x, weight) for weight, _ in layers]
    prepare_for_cpu(module)
    q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    for actual, wanted in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    # Attention layers split heads with `view`, which must work on a slice.
    assert q.view(1, 5, 3, 8).transpose(1, 2).shape == (1, 3, 5, 8)


def test_any_order_and_other_inputs_between() -> None:
    module = Projections()
    layers = plain(module)
    prepare_for_cpu(module)
    x, y = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    calls = [("v", x), ("q", y), ("k", x), ("k", y), ("q", x), ("q", x), ("v", y)]
    for name, value in calls:
        weight = layers["qkv".index(name)][0]
        actual = module.get_submodule(f"{name}_proj")(value)
        torch.testing.assert_close(actual, F.linear(value, weight), rtol=1e-5, atol=1e-6)


def test_the_result_is_let_go_with_the_last_slice() -> None:
    module = Projections()
    prepare_for_cpu(module)
    x = torch.randn(1, 5, 16)
    alive = weakref.ref(x)
    for layer in module.children():
        layer(x)
    del x
    assert alive() is None


@pytest.mark.parametrize("bias", [(True, True, True), (True, False, True)])
def test_biases(bias: tuple[bool, bool, bool]) -> None:
    module = Projections(bias=bias)
    layers = plain(module)
    prepare_for_cpu(module)
    x = torch.randn(7, 16)
    for layer, (weight, b) in zip(module.children(), layers, strict=True):
        torch.testing.assert_close(layer(x), F.linear(x, weight, b), rtol=1e-5, atol=1e-6)


def test_different_inputs_are_not_merged() -> None:
    module = Projections()
    module.v_proj = nn.Linear(12, 8)
    prepare_for_cpu(module)
    assert all(type(layer) is PackedLinear for layer in module.children())


def test_no_rows() -> None:
    module = Projections()
    prepare_for_cpu(module)
    assert module.q_proj(torch.empty(0, 16)).shape == (0, 24)


def test_threads_do_not_take_each_others_slices() -> None:
    module = Projections()
    layers = plain(module)
    prepare_for_cpu(module)
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(150):
            x = torch.randn(4, 16, generator=generator)
            for layer, (weight, _) in zip(module.children(), layers, strict=True):
                if not torch.allclose(layer(x), F.linear(x, weight), rtol=1e-4, atol=1e-5):
                    wrong.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------ memory
def test_old_weights_are_freed() -> None:
    model = build("qwen2")
    weights = [weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear]
    prepare_for_cpu(model)
    gc.collect()
    assert len(weights) == 15 and all(weight() is None for weight in weights)


def test_a_tied_head_keeps_the_embedding_table() -> None:
    model = build("llama")
    table = model.get_input_embeddings().weight
    prepare_for_cpu(model)
    assert model.get_input_embeddings().weight is table
    assert model.lm_head.weight.data_ptr() == table.data_ptr()


def test_weights_mapped_from_a_file_stay(tmp_path: Path) -> None:
    """They cost page cache only, and few rows are faster with them."""
    build("qwen2").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mapped = {
        name: module.weight.data_ptr() for name, module in model.named_modules() if type(module) is nn.Linear
    }
    prepare_for_cpu(model)
    for name, address in mapped.items():
        assert model.get_submodule(name).weight.data_ptr() == address, name
    x = torch.randn(1, MIN_PACKED_ROWS - 1, 64)
    layer = model.model.layers[0].self_attn.q_proj
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


# ------------------------------------------------------------------ what is left alone
def test_layers_that_do_more_or_other_things() -> None:
    class Special(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: out + 1)
    kept = nn.ModuleList(
        [Special(4, 4), hooked, nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta")]
    )
    before = list(kept)
    assert prepare_for_cpu(kept) == 0
    assert all(a is b for a, b in zip(kept, before, strict=True))


def test_without_onednn_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert prepare_for_cpu(build("llama")) == 0
