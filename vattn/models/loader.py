"""Load a model for the engine: find it, check it, convert it once, make it ready.

name ─ find_model ─┬ GGUF ─ inspect ─ converted copy ┐
                   ├ folder ─────────────────────────┼ config ─ check_supported ─ weights ┐
                   └ hub repository ─────────────────┘                                    ├ LoadedModel
a transformers model ─ check_supported ───────────────────────────────────────────────────┘
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from vattn.checks import shown
from vattn.errors import ConfigError, ModelNotFound, UnsupportedModel, VattnError
from vattn.models.attention import ATTENTION_NAME, register_attention
from vattn.models.collector import collector_paused
from vattn.models.cpu_linear import prepare_for_cpu
from vattn.models.gguf_cache import converted_copy
from vattn.models.gguf_convert import NOTES, convert_gguf
from vattn.models.gguf_file import inspect_gguf
from vattn.models.lease import ModuleLease
from vattn.models.placement import choose_device, choose_dtype
from vattn.models.proof import prove_packed
from vattn.models.sources import Gguf, Hub, find_model
from vattn.models.spec import ModelSpec, text_config
from vattn.models.support import PROVEN_TYPES, check_supported

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the engine needs to know of it.

    - `config`: the config of the text model. `spec`: the sizes in it.
    - `tokenizer`: None if the model came without one; then prompts are token ids.
    - `path`: a folder or hub id from which transformers loads the same weights; None: made in memory.
    - `fingerprint`: equal only for equal weights, config and dtype: KV of one is KV of the other.
    - `eos_token_ids`: tokens that end a generation: those of generation config and tokenizer.
    - `lease`: engines take the model from here; it serves any number of them at once.
    """

    model: nn.Module
    tokenizer: Any | None
    config: Any
    spec: ModelSpec
    name: str
    path: str | None
    fingerprint: str
    generation_config: Any
    eos_token_ids: frozenset[int]
    lease: ModuleLease

    def adapters(self) -> str:
        """Names of the adapters that are active right now: KV of one is not KV of another."""
        active = getattr(self.model, "active_adapters", None)
        if active is None or not getattr(
            self.model, "_hf_peft_config_loaded", hasattr(self.model, "peft_config")
        ):
            return ""
        names = active() if callable(active) else active
        return ",".join(map(str, names))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


def load_model(
    model: str | Path | nn.Module,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    tokenizer: Any | None = None,
    attn_implementation: str = ATTENTION_NAME,
    prepare: bool | None = None,
    progress: Callable[[str], None] | None = None,
    accept: Callable[[ModelSpec], object] | None = None,
) -> LoadedModel:
    """Load a model by name, or take one that is in memory.

    Args:
        model: `"smollm2"` (the demo model), a folder, a `.gguf` file, a hub id, or a transformers model.
            The latter stays as it is; only while an `LLM` uses it, it has our attention and eval mode.
        device: `"auto"` is CUDA where there is one.
        dtype: `"auto"` is float32 on CPU and the checkpoint's on CUDA (bfloat16 for GGUF).
        revision: branch, tag or commit of a hub repository.
        tokenizer: another one than the model's: a name, a folder, or a tokenizer.
        attn_implementation: transformers' name of the attention function to load with; an `LLM` switches
            to its own.
        prepare: rebuild linear layers for speed where that applies (`prepare_for_cpu`), for good. Default:
            of models loaded here, not of those handed over.
        progress: receives a line before a long wait; default: a warning to the log.
        accept: called with the model's sizes before weights are read; may raise to refuse them.

    Raises ModelNotFound (and says what was tried), UnsupportedModel (before weights are read; unknown
    architectures are tried out after) or ConfigError (wrong options, damaged files).
    """
    if isinstance(model, PreTrainedModel) and device == "auto":
        device = torch.device(model.device)
    place = choose_device(device)
    if attn_implementation == ATTENTION_NAME:
        register_attention()
    with collector_paused():
        if isinstance(model, nn.Module):
            loaded = _adopt(model, place, dtype, tokenizer, accept)
        else:
            files = _find(str(model), revision, trust_remote_code, progress or logger.warning)
            loaded = _read(files, place, dtype, attn_implementation, tokenizer, accept)
        if loaded.spec.model_type not in PROVEN_TYPES and attn_implementation == ATTENTION_NAME:
            with loaded.lease.held():
                prove_packed(loaded.model, loaded.spec)
        rebuild = not isinstance(model, nn.Module) if prepare is None else prepare
        if rebuild and place.type == "cpu":
            prepare_for_cpu(loaded.model)
    return loaded


@dataclass(frozen=True)
class _Files:
    """What transformers needs to load a model.

    `location`: folder or hub id. `options`: keyword arguments of every `from_pretrained`. `identity`:
    tells its weights from others; None: the hub will say. `decoded`: the weights are GGUF's, decoded.
    """

    name: str
    location: str
    options: dict[str, Any]
    identity: str | None
    decoded: bool = False


def _find(name: str, revision: str | None, trust: bool, announce: Callable[[str], None]) -> _Files:
    """Find the model, and convert it if it is a GGUF file."""
    source = find_model(name, revision)
    options = {"trust_remote_code": trust, "local_files_only": True, "revision": revision}
    if isinstance(source, Hub):
        return _Files(name, source.name, {**options, "local_files_only": source.offline}, None)
    if isinstance(source, Gguf):
        with _quiet():
            copy, digest = converted_copy(source.path, convert_gguf, check=inspect_gguf, announce=announce)
        return _Files(name, str(copy), options, digest, decoded=True)
    stats = ((file.name, file.stat()) for file in sorted(source.path.iterdir()))
    identity = _hash(*(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats))
    return _Files(name, str(source.path), options, identity)


def _read(
    files: _Files,
    place: torch.device,
    dtype: str | torch.dtype,
    attn_implementation: str,
    tokenizer: Any | None,
    accept: Callable[[ModelSpec], object] | None,
) -> LoadedModel:
    """Read config, weights and tokenizer, in this order."""
    with _errors_named(files), nullcontext() if files.identity is None else _quiet():
        config = AutoConfig.from_pretrained(files.location, **files.options)
        check_supported(config, _class_in_checkpoint(config, files))
        # Decoded weights are float32, which says nothing about the dtype to compute in.
        stored = torch.bfloat16 if files.decoded else config.dtype
        spec = ModelSpec.from_config(config, choose_dtype(dtype, place, stored))
        if accept is not None:
            accept(spec)
        model, report = AutoModelForCausalLM.from_pretrained(
            files.location,
            config=config,
            dtype=spec.dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **({} if place.type == "cpu" else {"device_map": {"": place}}),
            **files.options,
        )
        missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        if missing:  # transformers would fill them with random numbers
            raise ConfigError(
                f"{files.location} lacks {len(missing)} weights or has them in another shape, "
                f"the first is {missing[0]}"
            )
    tokens = _own_tokenizer(files) if tokenizer is None else _tokenizer(tokenizer)
    identity = files.identity or getattr(config, "_commit_hash", None) or files.location
    model = model.requires_grad_(False).eval()
    ours = attn_implementation == ATTENTION_NAME
    return _describe(model, tokens, spec, files.name, files.location, identity, ours=ours)


def _adopt(
    model: nn.Module,
    place: torch.device,
    dtype: str | torch.dtype,
    tokenizer: Any | None,
    accept: Callable[[ModelSpec], object] | None,
) -> LoadedModel:
    """Take a model that somebody else built, where it is and as it is."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"a model in memory must be a PreTrainedModel, not {type(model).__name__}")
    check_supported(model.config, type(model))
    if model.device.type != place.type:
        raise ConfigError(f"the model is on {model.device}, not on device={str(place)!r}: move it first")
    if dtype != "auto" and choose_dtype(dtype, place, None) != model.dtype:
        raise ConfigError(f"the model is in {model.dtype}, not in dtype={str(dtype)!r}: convert it first")
    spec = ModelSpec.from_config(model.config, choose_dtype(model.dtype, place, None))
    if accept is not None:
        accept(spec)
    tokens = None if tokenizer is None else _tokenizer(tokenizer)
    name = model.config._name_or_path or type(model).__name__
    return _describe(model, tokens, spec, name, None, _sample_weights(model), ours=False)


def _describe(
    model: PreTrainedModel,
    tokenizer: Any,
    spec: ModelSpec,
    name: str,
    path: str | None,
    identity: str,
    *,
    ours: bool,
) -> LoadedModel:
    generation = getattr(model, "generation_config", None)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=text_config(model.config),
        spec=spec,
        name=name,
        path=path,
        fingerprint=_hash(identity, model.config.to_json_string(), str(spec.dtype)),
        generation_config=generation,
        eos_token_ids=_end_tokens(spec.vocab_size, generation, tokenizer),
        lease=ModuleLease(model, ours=ours),
    )


def _end_tokens(vocab_size: int, *sources: Any) -> frozenset[int]:
    """The EOS tokens that any of the sources names, without those that the model can't produce."""
    found: set[int] = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        found.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    return frozenset(token for token in found if 0 <= token < vocab_size)


def _own_tokenizer(files: _Files) -> Any | None:
    """The tokenizer beside the weights; None if there is none that works."""
    if files.decoded:
        return _converted_tokenizer(Path(files.location), files.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.location, **files.options)
        if len(tokenizer) > len(tokenizer.all_special_ids):
            return tokenizer
        why: object = "its vocabulary is empty"  # transformers makes one up from the model's type alone
    except Exception as error:
        why = error
    logger.warning("%s has no usable tokenizer, so prompts must be token ids: %s", files.location, why)
    return None


def _converted_tokenizer(copy: Path, name: str) -> Any | None:
    """The tokenizer in the copy of a GGUF file, exactly as stored, and what there is to say of it.

    AutoTokenizer would choose a class by the model's type, and some of those cut text their own way.
    """
    for note in json.loads((copy / NOTES).read_text()):
        logger.warning("%s: %s", name, note)
    if not (copy / "tokenizer.json").is_file():
        return None
    return PreTrainedTokenizerFast.from_pretrained(copy, local_files_only=True)


def _tokenizer(tokenizer: Any) -> Any:
    """A tokenizer given as an object, or by name."""
    if isinstance(tokenizer, Tokenizer):
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if not isinstance(tokenizer, (str, Path)):
        if callable(tokenizer) and hasattr(tokenizer, "decode"):
            return tokenizer
        raise ConfigError(
            "tokenizer must be a name, a folder, a transformers tokenizer or a tokenizers.Tokenizer, got "
            f"{shown(tokenizer)}"
        )
    try:
        return AutoTokenizer.from_pretrained(str(tokenizer))
    except Exception as why:
        raise ModelNotFound(f"cannot load tokenizer={str(tokenizer)!r}: {why}") from why


def _class_in_checkpoint(config: Any, files: _Files) -> type | None:
    """The model class that comes as code with the checkpoint, if it is to be trusted and there is one."""
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is None or not files.options["trust_remote_code"]:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    options = {key: value for key, value in files.options.items() if key != "trust_remote_code"}
    found: type = get_class_from_dynamic_module(reference, files.location, **options)
    return found


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sample_weights(model: nn.Module) -> str:
    """A hash over some 1024 values from all over each parameter."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _errors_named(files: _Files) -> Iterator[None]:
    """Turn what transformers raises into errors of ours that name the model."""
    where = f"cannot load model {files.name!r} from {files.location}: "
    try:
        yield
    except (VattnError, torch.OutOfMemoryError):
        raise
    except Exception as why:
        text = str(why).strip() or type(why).__name__
        if "does not recognize this architecture" in text:
            raise UnsupportedModel(where + text.splitlines()[0]) from why
        raise (ModelNotFound if isinstance(why, OSError) else ConfigError)(where + text) from why


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: what is local takes a moment, or has been announced."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
