"""The model on this device: plan memory, run the forward pass, sample.

    launch    KVCache.begin_step -> AttentionInputs -> Runner.run -> logits -> Sampler.sample -> tokens
    collect   wait for the tokens and bring them to the host

With overlap the engine launches step n + 1 before it collects step n. A request then runs with a token the
host does not know yet (`pending`): its place is known, its value comes from step n's tokens on the device.

    device   | step n     | step n + 1 | step n + 2 |
    host       launch n+1 ┘ collect n  launch n+2 ┘ collect n+1 …
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.attention.base import AttentionBackend
from vattn.engine.executor import Executor, StepResult
from vattn.engine.groups import BeamGroup
from vattn.engine.packing import PackedBatch, pack
from vattn.engine.request import Request
from vattn.engine.runner import Runner
from vattn.engine.scheduler import Scheduled
from vattn.kv.base import KVCache
from vattn.models.lease import Loan
from vattn.models.loader import LoadedModel
from vattn.outputs import TokenLogprobs
from vattn.sampling.beam import Candidate
from vattn.sampling.beam_candidates import best_candidates
from vattn.sampling.sampler import SampledTokens, Sampler, prompt_logprobs


@dataclass(frozen=True)
class TorchStep:
    """A launched step."""

    sampled: SampledTokens | None
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]
    beams: dict[Request, list[Candidate]]


class TorchExecutor(Executor):
    """Runs a transformers causal LM over a KV cache.

    `enforce_eager`: True: no captured graphs. None: graphs on CUDA, with attention that allows it. False: the
    padded buffers of a graph also where there is nothing to capture. `loan`: its use of the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVCache,
        attention: AttentionBackend,
        *,
        max_batch: int,
        enforce_eager: bool | None = None,
        loan: Loan | None = None,
    ) -> None:
        device = next(loaded.model.parameters()).device
        self.kv = kv
        self.runner = Runner(loaded.model, attention, device, loan=loan)
        self.sampler = Sampler()
        self.overlaps = device.type == "cuda"
        self._num_heads = loaded.spec.num_heads
        self._max_batch = max_batch
        self._captures = device.type == "cuda" if enforce_eager is None else not enforce_eager

    def clock(self) -> float:
        return time.perf_counter()

    def cache_moved(self) -> None:
        """Capture graphs anew: they know the cache's addresses."""
        runner = self.runner
        runner.graphs = None  # should the capture fail: those of before may know addresses that are gone
        if self._captures:
            runner.graphs = runner.attention.decode_graphs(
                runner.model, self.kv, num_heads=self._num_heads, max_batch=self._max_batch
            )

    def launch(self, items: Sequence[Scheduled], behind: TorchStep | None) -> TorchStep:
        inputs = self.kv.begin_step([item.chunk for item in items])
        packed = pack(items)
        tokens = behind.sampled.token_ids if behind is not None and behind.sampled else None
        logits = self.runner.run(packed, inputs, tokens)
        prompts = _prompt_logprobs(packed, logits)
        sampling = [item.request for item in items if item.samples]
        sampled = None
        beams: dict[Request, list[Candidate]] = {}
        if sampling:
            rows = logits if len(sampling) == logits.shape[0] else logits[packed.sample_rows]
            sampled = self.sampler.sample(rows, [request.sampling for request in sampling])
            beams = _beam_candidates(rows, sampling)
        self.kv.submitted(self.runner.record_event())
        return TorchStep(sampled, prompts, beams)

    def collect(self, handle: TorchStep) -> StepResult:
        sampled = handle.sampled
        return StepResult(
            token_ids=[] if sampled is None else sampled.token_ids.tolist(),
            logprobs=None if sampled is None else sampled.logprobs,
            prompt_logprobs=handle.prompt_logprobs,
            beams=handle.beams,
        )


def _prompt_logprobs(
    packed: PackedBatch, logits: Tensor
) -> list[tuple[Request, list[TokenLogprobs | None]]]:
    return [
        (
            rows.request,
            prompt_logprobs(
                logits[rows.rows],
                rows.next_token_ids,
                rows.request.params.prompt_logprobs or 0,
                start=rows.start,
            ),
        )
        for rows in packed.prompt_rows
    ]


def _beam_candidates(logits: Tensor, sampling: Sequence[Request]) -> dict[Request, list[Candidate]]:
    """What may follow each beam, best first, as many as its search looks at."""
    found = [(row, r, r.group.search) for row, r in enumerate(sampling) if isinstance(r.group, BeamGroup)]
    if not found:
        return {}
    rows = torch.tensor([row for row, _, _ in found], device=logits.device)
    most = max(search.keep for _, _, search in found)
    best = best_candidates(logits[rows], most, [search.params.temperature or 1.0 for _, _, search in found])
    return {r: row[: search.keep] for (_, r, search), row in zip(found, best, strict=True)}
