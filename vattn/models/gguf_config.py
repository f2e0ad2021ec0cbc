"""From the keys of a GGUF file to a transformers config: every key is applied, refused or known to be idle.

    <architecture>.*   could change the model: applied to the config, or refused with key and value;
                       a key this module does not know is refused
    tokenizer.*        gguf_tokenizer applies them, and names those it does not use
    general.*, split.*, quantize.*, imatrix.* and other prefixes: about the file, not the model

transformers reads some of these keys when it makes the config, but which ones differs between
architectures and versions; so each is applied here again, to the field that the config has for it.
"""

from __future__ import annotations

from typing import Any

from vattn.errors import ConfigError, UnsupportedModel
from vattn.models.gguf_file import GgufSummary
from vattn.models.gguf_rope import KEYS as ROPE_KEYS
from vattn.models.gguf_rope import Rope
from vattn.models.gguf_tokenizer import SENTENCEPIECE_IDS

# Key → fields of configs that mean the same; a config has one of them.
_FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
# Without these transformers would take a default of its own.
_NEEDED = (
    ("context_length",),
    ("attention.head_count",),
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
)
# Features that are off at these values, and that vattn or transformers' loader lacks otherwise.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
}
# Notes about how the file was made.
_IDLE = frozenset({"tensor_data_layout", "pooling_type", "attention.sliding_window_pattern"})
_FIXED_GATING = {1: "softmax", 2: "sigmoid"}  # expert_gating_func


def check_kind(summary: GgufSummary) -> None:
    """Refuse what transformers could not make a config of. Raises UnsupportedModel with key and value."""
    kind = summary.fields.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"general.type={kind!r}: the file holds no model")
    for key, value in summary.fields.items():
        if key.startswith(summary.architecture + ".") and isinstance(value, list):
            raise UnsupportedModel(f"{key}={value!r}: vattn needs one value for all layers")


def apply_keys(config: Any, summary: GgufSummary) -> Rope:
    """Put every key of the file into `config`; returns what the file says of rotary positions.

    Raises UnsupportedModel, with key and value, for a key that cannot be applied, and ConfigError if
    one is missing that no tensor's shape would tell.
    """
    prefix = summary.architecture + "."
    keys = {k.removeprefix(prefix): v for k, v in summary.fields.items() if k.startswith(prefix)}
    # Without the last one transformers leaves llama's q and k in llama.cpp's order of rows.
    needed = (*_NEEDED, ("attention.head_count_kv",)) if summary.architecture == "llama" else _NEEDED
    for alternatives in needed:
        if not any(key in keys for key in alternatives):
            raise ConfigError(f"it lacks the key {prefix}{alternatives[0]}")
    keys.setdefault("attention.head_count_kv", keys["attention.head_count"])

    def refuse(key: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{prefix}{key}={keys[key]!r}: {why}")

    for key, value in keys.items():
        if key in _FIELDS:
            field = next((field for field in _FIELDS[key] if hasattr(config, field)), None)
            if field is not None:
                setattr(config, field, value)
            elif not _is_implied(key, value, keys, config):
                raise refuse(key, f"{config.model_type} has no {' or '.join(_FIELDS[key])} in transformers")
        elif key == "attention.value_length":
            if value != _head_dim(config, keys):
                raise refuse(key, f"keys are {_head_dim(config, keys)} long")
        elif key == "attention.sliding_window":
            if 0 < value < keys.get("context_length", 0):
                raise refuse(key, "vattn has no sliding-window attention")
        elif key == "expert_gating_func":
            if getattr(config, "scoring_func", "softmax") != _FIXED_GATING.get(value):
                raise refuse(key, f"{config.model_type} weighs experts otherwise in transformers")
        elif key in _OFF:
            if value not in _OFF[key]:
                raise refuse(key, "vattn does not apply this to models from GGUF files")
        elif key not in ROPE_KEYS and key not in _IDLE:
            raise refuse(key, "vattn does not know this key, which may change the model")

    _apply_special_ids(config, summary)
    if hasattr(config, "head_dim"):  # transformers may have taken it from rope.dimension_count
        config.head_dim = _head_dim(config, keys)
    if not keys.get("attention.sliding_window") and getattr(config, "sliding_window", None):
        config.sliding_window = None  # a default of transformers, not of the file
    rope = Rope(summary, _head_dim(config, keys), config.max_position_embeddings)
    if hasattr(config, "rope_parameters"):
        before = config.rope_parameters or {}
        config.rope_parameters = rope.parameters()
        if "partial_rotary_factor" in before:  # some classes need it at 1 too
            config.rope_parameters["partial_rotary_factor"] = rope.partial
        if hasattr(config, "original_max_position_embeddings"):  # transformers gives it precedence
            config.original_max_position_embeddings = config.rope_parameters.get(
                "original_max_position_embeddings", config.max_position_embeddings
            )
    return rope


def _head_dim(config: Any, keys: dict[str, Any]) -> int:
    heads, hidden = config.num_attention_heads, config.hidden_size
    return int(keys.get("attention.key_length") or hidden // heads)


def _is_implied(key: str, value: Any, keys: dict[str, Any], config: Any) -> bool:
    """Whether a config without a field for `key` has that value anyway."""
    if key == "attention.key_length":
        return bool(value == config.hidden_size // config.num_attention_heads)
    if key == "attention.head_count_kv":
        return bool(value == config.num_attention_heads)
    if key.startswith("expert_"):
        return not value
    other = {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"} - {key}
    return "epsilon" in key and bool(other & keys.keys())  # converters write both, models use one


def _apply_special_ids(config: Any, summary: GgufSummary) -> None:
    """Take the ids of bos, eos and pad from the file: defaults of a config class mean another vocabulary."""
    defaults = SENTENCEPIECE_IDS if summary.fields.get("tokenizer.ggml.model") == "llama" else {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = summary.fields.get(f"tokenizer.ggml.{name}_token_id", defaults.get(role))
        inside = isinstance(token_id, int) and 0 <= token_id < config.vocab_size
        setattr(config, f"{role}_token_id", token_id if inside else None)


def stop_ids(config: Any, summary: GgufSummary) -> list[int]:
    """Ids of the tokens that end a text (eos), a turn (eot) or a message (eom), in this order."""
    turns = (summary.fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eom"))
    ids = [config.eos_token_id, *turns]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < config.vocab_size))
