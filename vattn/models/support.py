"""Which models the engine can run, decided from the config alone.

The engine replaces attention by plain causal softmax attention over one K and one V per layer, token
and KV head. A model that does anything else at that place (windows, sinks, biases, compressed KV)
would still run, and answer nonsense; so every such feature is looked for by name, in `RULES`.

What transformers does not write into a config, such as the sinks of gpt-oss, is listed by model type
in `FEATURES_OF_TYPE`. Model types in `PROVEN_TYPES` passed `proof.prove_packed` (packed sequences with
explicit positions equal separate ones) on transformers 5.17 and 5.24; other types that pass the
rules are put to that proof when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vattn.errors import UnsupportedModel
from vattn.models.fields import get_field
from vattn.models.rope import longest_sequence
from vattn.models.spec import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROVEN_TYPES = frozenset(
    """
    apertus arcee aria_text bitnet codegen cohere ctrl ernie4_5 ernie4_5_moe flex_olmo gemma glm
    glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 llama minimax_m2 ministral3 mistral mixtral
    nanochat olmo olmo2 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open starcoder2
    """.split()  # noqa: SIM905
)

FEATURES_OF_TYPE = {
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
    "gpt_oss": "attention sinks",
    "flint": "attention sinks",
    "granite_swa": "attention sinks",
    "granitemoe_swa": "attention sinks",
    "deepseek_v4": "compressed attention",
    "diffllama": "differential attention",
    "doge": "dynamic attention masks",
    "dory": "layers that run several times",
    "hrm_text": "layers that run several times",
    "inkling2_loop_text": "layers that run several times",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "falcon_mamba": "state-space layers",
    "rwkv": "recurrent layers",
    "xlstm": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
    "reformer": "hashed attention",
    "xlnet": "two-stream attention",
    "big_bird": "block-sparse attention",
    "fuyu": "image input",
    "moshi": "audio input",
}

# What a value of `layer_types` other than full attention means.
_LAYER_FEATURES = {
    "sliding_attention": "sliding-window attention",
    "hybrid_sliding": "sliding-window attention",
    "chunked_attention": "chunked attention",
    "conv": "convolution layers",
    "linear_attention": "linear-attention or state-space layers",
    "mamba": "linear-attention or state-space layers",
    "hybrid": "linear-attention or state-space layers",
    "moe": "layers without attention",
    "mlp": "layers without attention",
}
_FULL_ATTENTION = frozenset({"full_attention", "attention"})

Find = Callable[[Any], Iterator[tuple[str, str]]]
"""Looks into a config; yields (feature, evidence as `field=value`) for what it finds."""


def _when(feature: str, *fields: str, value: Callable[[Any], bool] = bool) -> Find:
    """The feature is there if any of `fields` has a value like that."""

    def find(config: Any) -> Iterator[tuple[str, str]]:
        for field in fields:
            found = get_field(config, field)
            if found is not None and value(found):
                yield feature, f"{field}={_short(found)}"

    return find


def _type_features(config: Any) -> Iterator[tuple[str, str]]:
    if feature := FEATURES_OF_TYPE.get(config.model_type):
        yield feature, f"model_type={config.model_type!r}"


def _modalities(config: Any) -> Iterator[tuple[str, str]]:
    words = {"vision": "image", "image": "image", "vq": "image", "audio": "audio", "speech": "audio"}
    for field in vars(config):
        if field.endswith(("_config", "_encoder")) and get_field(config, field) is not None:
            for word in words.keys() & field.split("_"):
                yield f"{words[word]} input", f"{field} is set"


def _layer_kinds(config: Any) -> Iterator[tuple[str, str]]:
    kinds = get_field(config, "layer_types") or ()
    for kind in dict.fromkeys(kinds):
        feature = _LAYER_FEATURES.get(kind, f"layers of the kind {kind!r}")
        if kind not in _FULL_ATTENTION and not ("window" in feature and _window_is_idle(config)):
            yield feature, f"layer_types has {kind!r}" + _window_note(config, feature)


def _window(config: Any) -> Iterator[tuple[str, str]]:
    """A window that applies to all layers: `layer_types`, where there is one, says which have one."""
    window, per_layer = get_field(config, "sliding_window"), get_field(config, "layer_types") is not None
    off = per_layer or get_field(config, "use_sliding_window") is False
    if window and not off and not _window_is_idle(config):
        yield "sliding-window attention", f"sliding_window={window}"


def _window_is_idle(config: Any) -> bool:
    """Whether no sequence is long enough to notice the window (Phi-3.5: 262,144 over 131,072 tokens)."""
    window, longest = get_field(config, "sliding_window"), longest_sequence(config)
    return isinstance(window, int) and longest is not None and window >= longest


def _window_note(config: Any, feature: str) -> str:
    return f", sliding_window={get_field(config, 'sliding_window')}" if "window" in feature else ""


def _encoder_mode(config: Any) -> Iterator[tuple[str, str]]:
    """BERT and its kin serve as encoders unless told; in other configs `is_decoder` means nothing."""
    if get_field(config, "is_decoder") is False and hasattr(config, "add_cross_attention"):
        yield "bidirectional attention", "is_decoder=False"


def _uneven_layers(config: Any) -> Iterator[tuple[str, str]]:
    if get_field(config, "is_heterogeneous"):
        yield "layers of different shapes", "per_layer_config is set"
    for field in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_attention_heads_per_layer"):
        sizes = get_field(config, field)
        if isinstance(sizes, (list, tuple)) and len(set(sizes)) > 1:
            yield "layers of different shapes", f"{field}={_short(sizes)}"


def _value_size(config: Any) -> Iterator[tuple[str, str]]:
    size, value = get_field(config, "head_dim"), get_field(config, "v_head_dim")
    if value is not None and size is not None and value != size:
        yield "keys and values of different sizes", f"head_dim={size}, v_head_dim={value}"


# Of the whole model, which may wrap the text model:
MODEL_RULES: tuple[Find, ...] = (
    _type_features,
    _when("encoder-decoder models", "is_encoder_decoder"),
    _modalities,
)
# Of the text model:
RULES: tuple[Find, ...] = (
    _type_features,
    _encoder_mode,
    _when("bidirectional attention", "is_causal", value=lambda causal: causal is False),
    _when("bidirectional attention", "use_bidirectional_attention"),
    _when("cross-attention", "add_cross_attention", "cross_attention_layers"),
    _layer_kinds,
    _window,
    _when("chunked attention", "attention_chunk_size"),
    _when("local attention", "attention_layers", value=lambda kinds: "local" in kinds),
    _when("sparse attention", "index_topk", "sparse_attention_config"),
    _when("soft-capped attention scores", "attn_logit_softcapping"),
    _when("attention sinks", "add_full_attention_sink_bias", "add_swa_attention_sink_bias"),
    _when("multi-head latent attention (MLA)", "kv_lora_rank"),
    _when("ALiBi position biases", "alibi"),
    _when("KV shared between layers", "num_kv_shared_layers"),
    _uneven_layers,
    _value_size,
)


def check_supported(config: PreTrainedConfig, model_class: type | None = None) -> None:
    """Raise UnsupportedModel, naming each feature and the field that holds it, or return.

    `model_class`: the class that will run it; default: the one transformers has for the config. Nothing
    but configs and class attributes is read, so this comes before weights are loaded.
    """
    text = text_config(config)
    found: dict[str, str] = {}
    for rules, part in ((MODEL_RULES, config), (RULES, text)):
        for rule in rules:
            for feature, evidence in rule(part):
                found.setdefault(feature, evidence)
    if found:
        features = "; ".join(f"{feature} ({evidence})" for feature, evidence in found.items())
        raise UnsupportedModel(f"{config.model_type} models use what vattn does not do: {features}")
    model_class = model_class or _causal_class(config)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{model_class.__name__} computes attention by itself, not through transformers' "
            "AttentionInterface (_supports_attention_backend=False), so its KV cache cannot be managed"
        )


def _causal_class(config: PreTrainedConfig) -> type:
    """transformers' class that generates text from such a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModel(
            f"{config.model_type} is not a decoder-only language model: "
            f"transformers has no AutoModelForCausalLM for {type(config).__name__}"
        ) from None
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
