"""Run the model on a packed batch: tokens in, logits of the rows that matter out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vattn.attention.base import AttentionBackend
from vattn.kv.base import AttentionInputs


class Runner:
    """A transformers causal LM, loaded with `attn_implementation="vattn"`."""

    def __init__(self, model: nn.Module, attention: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self.attention = attention
        self.device = device

    @torch.inference_mode()
    def run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        inputs: AttentionInputs,
        logit_rows: Sequence[int],
    ) -> Tensor:
        """One forward pass over packed tokens.

        `token_ids` and `positions` have T entries; returns logits `[len(logit_rows), vocab]` of the
        tokens named by `logit_rows`. K and V of all T tokens are in the cache afterwards.
        """
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            vattn_step=self.attention.plan(inputs),
        )
        logits: Tensor = output.logits[0]
        return logits
