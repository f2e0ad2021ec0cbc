"""How long a sequence may be, by the kind of rotary positions.

    kind       longest sequence                  frequencies
    default    max_position_embeddings (M)       the same at every length
    llama3     M                                 the same
    linear     factor x M                        the same
    yarn       factor x original, or M           the same
    longrope   original                          others beyond it: sequences stay below
    dynamic    M, or factor x M if asked for     change with the length beyond M: fixed if asked for

As in vLLM, but for longrope and for dynamic, where vLLM has the frequencies of the longest sequence for
every one. transformers computes them anew as a sequence grows and keeps the cached keys as they are, which
no batch can follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vattn.errors import UnsupportedModel
from vattn.models.fields import LENGTH_FIELDS, get_field

if TYPE_CHECKING:
    from torch import Tensor, nn


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest sequence whose positions mean the same at every length; None: not said."""
    trained = _trained(config)
    rope = get_field(config, "rope_parameters") or {}
    limits = [] if trained is None else [trained]
    for parameters in (rope, *rope.values()):  # one set for all layers, or one per kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings") or limits[0])
    if trained is not None and rope.get("rope_type") in ("linear", "yarn"):
        limits = [_scaled(trained, rope)]
        window = get_field(config, "sliding_window")
        if isinstance(window, int) and window >= trained:  # so that it stays one that no sequence notices
            limits.append(window)
    return min(limits, default=None)


def longest_stretched(config: Any) -> int | None:
    """The same with the frequencies of `stretch`; None where they are not dynamic."""
    trained = _trained(config)
    rope = get_field(config, "rope_parameters") or {}
    return _scaled(trained, rope) if trained is not None and rope.get("rope_type") == "dynamic" else None


class Stretched(NamedTuple):
    """A rotary module, and what it had before `stretch`."""

    module: Any
    rope_type: str
    frequencies: Tensor
    attention_scaling: float

    def undo(self) -> None:
        """Give it back what it had."""
        self.module.inv_freq = self.frequencies
        self.module.attention_scaling, self.module.rope_type = self.attention_scaling, self.rope_type


def stretch(model: nn.Module) -> list[Stretched]:
    """Give dynamic rotary modules the frequencies of their longest sequence, for every sequence.

    Raises UnsupportedModel, and changes nothing, if the model has no such module.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changed = []
    module: Any
    for module in model.modules():
        if getattr(module, "rope_type", None) != "dynamic":
            continue
        config = module.config
        length = longest_stretched(config)
        before = Stretched(module, "dynamic", module.inv_freq, module.attention_scaling)
        frequencies, scaling = ROPE_INIT_FUNCTIONS["dynamic"](
            config, before.frequencies.device, seq_len=length
        )
        module.inv_freq = frequencies
        # Not a kind that transformers knows: it leaves the frequencies alone.
        module.attention_scaling, module.rope_type = scaling, "stretched"
        changed.append(before)
    if not changed:
        raise UnsupportedModel("its dynamic rotary positions are not where transformers usually has them")
    return changed


def _trained(config: Any) -> int | None:
    found = (get_field(config, field) for field in LENGTH_FIELDS)
    return next((length for length in found if isinstance(length, int) and length > 0), None)


def _scaled(trained: int, rope: dict[str, Any]) -> int:
    factor = float(rope.get("factor") or 1.0)
    if rope.get("rope_type") == "yarn":
        return max(trained, int((rope.get("original_max_position_embeddings") or trained) * factor))
    return max(trained, int(trained * factor))
