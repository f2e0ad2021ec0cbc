"""Runs the model on a packed batch and returns the logits of the rows that are needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vattn.attention.base import AttentionBackend, StepTimer
from vattn.attention.graphs import DecodeGraphs
from vattn.engine.packing import PackedBatch
from vattn.kv.base import AttentionInputs
from vattn.models.lease import Loan


class Runner:
    """Runs a transformers causal LM with our attention. Decodes replay `graphs`, if there are any."""

    def __init__(
        self,
        model: nn.Module,
        attention: AttentionBackend,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        loan: Loan | None = None,
    ) -> None:
        """`loan` checks in every step that the model still uses our attention."""
        self.model = model
        self._loan = loan
        self.attention = attention
        self.device = device
        self.graphs = graphs
        self.timer: StepTimer | None = None
        """Times the attention of steps that do not run from graphs; None if no probe needs it."""

    @torch.inference_mode()
    def run(self, packed: PackedBatch, inputs: AttentionInputs, last_tokens: Tensor | None) -> Tensor:
        """One forward pass over packed tokens.

        `last_tokens` `[rows]`, on the device, holds the values of pending tokens. Returns logits
        `[len(packed.logit_rows), vocab]`. K and V of all tokens are in the cache afterwards.
        Raises ModelChanged if the model no longer uses our attention. The result is then discarded.
        """
        if self._loan is not None:
            self._loan.check()
        with torch.autocast(self.device.type, enabled=False):  # the caller's autocast must not apply here
            logits = self._logits(packed, inputs, last_tokens)
        if self._loan is not None:
            self._loan.check()
        return logits

    def _logits(self, packed: PackedBatch, inputs: AttentionInputs, last_tokens: Tensor | None) -> Tensor:
        if self.graphs is not None and self.graphs.fits(inputs):
            logits = self.graphs.run(packed, inputs, last_tokens)
            return logits if len(packed.logit_rows) == len(logits) else logits[packed.logit_rows]
        step = self.attention.plan(inputs)
        token_ids = torch.tensor(packed.token_ids, device=self.device)
        if packed.pending:
            assert last_tokens is not None
            at, rows = torch.tensor(packed.pending, device=self.device).unbind(1)
            token_ids[at] = last_tokens[rows].clamp(min=0)
        output = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=torch.tensor([packed.positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(packed.logit_rows, dtype=torch.int64, device=self.device),
            vattn_step=step if self.timer is None else self.timer.timed(step),
        )
        result: Tensor = output.logits[0]
        return result

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after the work submitted so far. Returns None on a CPU, where that work is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
