"""Static scales from a calibration run: how large keys and values get on given texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn.errors import ConfigError
from vattn.kv.ranges import KVRanges
from vattn.lab.quality.passages import CALIBRATE
from vattn.models.loader import LoadedModel


class _Watch:
    """Causal attention over one whole text, without a cache, which notes the largest keys and values."""

    def __init__(self, layers: int, kv_heads: int, device: torch.device) -> None:
        self.largest = torch.zeros(layers, 2, kv_heads, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen = torch.stack((k, v)).float().abs().amax((1, 3))
        torch.maximum(self.largest[layer], seen, out=self.largest[layer])
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel,
    texts: Sequence[str | list[int]] = CALIBRATE,
    *,
    max_tokens: int = 512,
    headroom: float = 1.0,
) -> KVRanges:
    """The largest magnitude per layer, K or V and head over `texts` (or token ids), times `headroom`.

    Texts are cut into pieces of at most `max_tokens`. What exceeds the ranges later is clamped, so texts
    should be like those to come; a headroom above 1 trades resolution for safety.

    Raises ConfigError where there is nothing to run.
    """
    if not headroom > 0:
        raise ConfigError(f"headroom must be positive, got {headroom!r}")
    pieces = [ids for text in texts for ids in pieces_of(loaded, text, max_tokens)]
    if not pieces:
        raise ConfigError("there is no text to calibrate on")
    spec, device = loaded.spec, next(loaded.model.parameters()).device
    watch = _Watch(spec.num_layers, spec.num_kv_heads, device)
    with loaded.lease.held():
        for ids in pieces:
            tokens = torch.tensor([ids], device=device)
            loaded.model(
                input_ids=tokens,
                position_ids=torch.arange(len(ids), device=device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=1,
                vattn_step=watch,
            )
    k, v = (watch.largest * headroom).cpu().unbind(1)
    return KVRanges(k, v)


def pieces_of(loaded: LoadedModel, text: str | list[int], max_tokens: int) -> list[list[int]]:
    """Token ids of a text in pieces of at most `max_tokens`, the model's length at most."""
    length = min(max_tokens, loaded.spec.max_model_len - 1)
    if isinstance(text, str) and loaded.tokenizer is None:
        raise ConfigError("texts need a tokenizer, and the model came without one: give token ids")
    ids: list[int] = loaded.tokenizer(text)["input_ids"] if isinstance(text, str) else text  # type: ignore[misc]
    return [ids[i : i + length] for i in range(0, len(ids), length)]
