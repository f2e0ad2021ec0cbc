"""A transformers model handed to an `LLM`: whom it serves, and how it comes back."""

from __future__ import annotations

import copy
import gc
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

import vattn
from tests.engine.engines import BACKENDS, hf_greedy, random_prompts
from tests.models.tiny import TINY, build, randomize
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError, StepError, VattnError
from vattn.models.loader import load_model

NAME = "llama"
PROMPTS = random_prompts(3, [20, 5], 100)
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 64}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def a_model() -> PreTrainedModel:
    """Half of it in training mode, as in the middle of somebody's work."""
    model = build(NAME)
    model.set_attn_implementation("sdpa")
    model.model.layers[1].train()
    return model


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything a user could notice: modules, modes, hooks, weights, where they are, configs."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (id(module), type(module), module.training, sorted(module.__dict__))
        hooks = [value for key, value in sorted(module.__dict__.items()) if key.endswith("hooks")]
        found[f"{name} hooks"] = [len(each) for each in hooks]
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[f"{name} config"] = (id(config), repr(sorted(vars(config).items(), key=str)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        content = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        found[f"{name} tensor"] = (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad, content)
    found["generation config"] = model.generation_config.to_dict()
    return found


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """The body may do with the model what it likes; afterwards it is as before, and generates the same."""
    expected = hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [6, 6])
    before = fingerprint(model)
    yield
    assert fingerprint(model) == before
    assert hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [6, 6]) == expected


# ---------------------------------------------------------------------- one owner at a time
def test_a_model_serves_one_llm_at_a_time() -> None:
    model = a_model()
    expected = hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [6, 6])
    with unchanged(model), LLM(model, **SMALL) as first:
        with pytest.raises(ConfigError, match="LlamaForCausalLM serves an LLM already"):
            LLM(model, **SMALL)
        outputs = first.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    with unchanged(model), LLM(model, **SMALL) as second:
        outputs = second.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected


def test_models_that_share_a_config_serve_one_llm_at_a_time() -> None:
    config = TINY[NAME]()
    first, second = (randomize(LlamaForCausalLM(config), seed) for seed in (0, 1))
    assert first.config is second.config
    with LLM(first, **SMALL), pytest.raises(ConfigError, match="shares its config with a model that does"):
        LLM(second, **SMALL)
    with unchanged(second), LLM(second, **SMALL):
        pass


@pytest.mark.parametrize("first_out", [0, 1])
def test_llms_that_share_a_loaded_model_give_it_back_with_the_last_of_them(first_out: int) -> None:
    model = a_model()
    expected = hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [6, 6])
    with unchanged(model):
        loaded = load_model(model)
        assert model.config._attn_implementation == "sdpa"
        llms = [LLM(loaded, kv_backend=backend, **SMALL) for backend in ("virtual", "paged")]
        with pytest.raises(ConfigError, match="serves an LLM already"):
            LLM(model, **SMALL)
        llms.pop(first_out).close()
        outputs = llms[0].generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        llms[0].close()
    with unchanged(model), LLM(loaded, **SMALL) as later:
        outputs = later.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected


# ---------------------------------------------------------------------- every way out
@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 10**6},
        {"kv_cache_memory_bytes": 1},
        {"attention": "flash_attn"},
        {"attention": "none such"},
        {"dtype": "bfloat16"},
        {"tokenizer": "/nowhere"},
        {"kv_scales": "/nowhere", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_a_refused_llm_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    model = a_model()
    with unchanged(model), pytest.raises(VattnError):
        LLM(model, **{**SMALL, **options})


class Planted(BaseException):
    """Not an Exception, as a Ctrl-C is none."""


class FailingCall:
    """Raises `Planted` in the `nth` call of a function of the engine, counted from 0.

    Only giving the model back is spared: interrupts are held there.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __enter__(self) -> FailingCall:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        cleaning = code.co_filename.endswith("lease.py") and code.co_name in ("give_back", "_return")
        if str(_PACKAGE) in code.co_filename and not cleaning:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise Planted


_PACKAGE = Path(vattn.__file__).parent


@pytest.mark.parametrize("backend", ["virtual", "paged", "static"])
def test_an_llm_that_fails_anywhere_on_its_way_leaves_the_model_as_it_was(backend: Any) -> None:
    model = a_model()
    counting = FailingCall(10**9)
    with unchanged(model), counting, LLM(model, kv_backend=backend, **SMALL):
        pass
    calls = 10**9 - counting.left
    failed = 0
    with unchanged(model):
        before = fingerprint(model)
        for nth in [*range(0, calls, max(1, calls // 60)), *range(calls - 20, calls)]:
            try:
                with FailingCall(nth), LLM(model, kv_backend=backend, **SMALL):
                    pass
            except Planted:
                failed += 1
            gc.collect()
            assert fingerprint(model) == before, f"call {nth} of {calls}"
    assert failed > 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_llm_that_is_dropped_gives_the_model_back(backend: str) -> None:
    model = a_model()
    with unchanged(model):
        llm = LLM(model, **{**SMALL, **BACKENDS[backend]})
        llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        assert model.config._attn_implementation == "vattn"
        del llm
        gc.collect()


def test_an_llm_of_an_ended_program_gives_the_model_back() -> None:
    code = """
import atexit
atexit.register(  # before anything is imported, so it runs last
    lambda: print("at exit:", model.config._attn_implementation, model.model.layers[1].training)
)
from tests.engine.test_lent_model import SMALL, a_model, LLM
model = a_model()
llm = LLM(model, **SMALL)
print("while it lives:", model.config._attn_implementation)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["while it lives: vattn", "at exit: sdpa True"], done.stderr


def test_an_unproven_model_is_as_it_was_after_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.models.loader.PROVEN_TYPES", frozenset())
    model = a_model()
    with unchanged(model):
        loaded = load_model(model)
    with unchanged(model), LLM(loaded, **SMALL):
        pass


# ---------------------------------------------------------------------- changed while it is in use
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", ["attention", "training"])
def test_a_change_while_it_is_in_use_is_an_error_and_spoils_nothing(backend: str, change: str) -> None:
    model = a_model()
    expected = hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [30, 30])
    with LLM(model, **{**SMALL, **BACKENDS[backend]}) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(30))
        next(stream)
        if change == "attention":
            model.set_attn_implementation("sdpa")
        else:
            model.train()
        with pytest.raises(StepError, match=r"ModelChanged: .* while an LLM uses it: go on with"):
            llm.generate(PROMPTS, greedy(30), use_tqdm=False)
        with pytest.raises(StepError, match="ModelChanged"), stream:
            list(stream)
        if change == "attention":
            model.set_attn_implementation("vattn")
        else:
            model.eval()
        outputs = llm.generate(PROMPTS, greedy(30), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()


def test_an_attention_chosen_while_in_use_stays_after_closing() -> None:
    model = a_model()
    with LLM(model, **SMALL):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert model.model.layers[1].training


# ---------------------------------------------------------------------- autocast
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_of_the_caller_changes_nothing(backend: str) -> None:
    model = a_model()
    expected = hf_greedy(copy.deepcopy(model).eval(), PROMPTS, [6, 6])
    with torch.autocast("cpu", dtype=torch.bfloat16), LLM(model, **{**SMALL, **BACKENDS[backend]}) as llm:
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert torch.is_autocast_enabled("cpu")
    assert [o.outputs[0].token_ids for o in outputs] == expected


# ---------------------------------------------------------------------- end tokens that can't be
@pytest.mark.parametrize("backend", ["virtual", "paged", "static"])
def test_end_tokens_outside_the_vocabulary_change_nobodys_tokens(backend: Any) -> None:
    model = a_model()
    vocab = model.config.vocab_size
    wanted = SamplingParams(temperature=0, max_tokens=8, min_tokens=8, logprobs=2)
    model.generation_config.eos_token_id = [2]
    with LLM(model, kv_backend=backend, **SMALL) as llm:
        expected = llm.generate(PROMPTS, wanted, use_tqdm=False)
    model.generation_config.eos_token_id = [2, -1, vocab, vocab + 7, 10**6]
    with LLM(model, kv_backend=backend, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, wanted, use_tqdm=False)
    for got, want in zip(outputs, expected, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert [sorted(e) for e in got.outputs[0].logprobs or []] == [
            sorted(e) for e in want.outputs[0].logprobs or []
        ]
