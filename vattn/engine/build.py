"""Builds the engine that runs a loaded model on its device."""

from __future__ import annotations

from vattn.attention.factory import create_attention
from vattn.config import SchedulerConfig
from vattn.engine.engine import Engine
from vattn.engine.events import EventLog
from vattn.engine.intake import Intake
from vattn.engine.torch_executor import TorchExecutor
from vattn.kv.base import KVCache
from vattn.models.lease import Loan
from vattn.models.loader import LoadedModel
from vattn.sampling.detokenize import TokenText


def build_engine(
    loaded: LoadedModel,
    kv: KVCache,
    config: SchedulerConfig,
    *,
    max_model_len: int,
    attention: str = "auto",
    overlap: bool | None = None,
    enforce_eager: bool | None = None,
    seed: int = 0,
    trace: EventLog | None = None,
    loan: Loan | None = None,
) -> Engine:
    """Build an engine that runs a model with the cache `kv`. Most arguments are those of `LLM`.

    `trace` is the log of the engine's decisions. `loan` is the engine's right to use the model. The caller
    owns both and must close them. Raises ConfigError if the attention kernel can't read the cache's memory
    or can't run on this device.
    """
    device = next(loaded.model.parameters()).device
    executor = TorchExecutor(
        loaded,
        kv,
        create_attention(attention, kv, device),
        max_batch=config.max_num_seqs,
        enforce_eager=enforce_eager,
        loan=loan,
    )
    intake = Intake(
        vocab_size=loaded.spec.vocab_size,
        max_model_len=max_model_len,
        vocabulary=None if loaded.tokenizer is None else TokenText(loaded.tokenizer),
        eos_token_ids=loaded.eos_token_ids,
        shares_prefixes=kv.shares_prefixes,
        adapters=loaded.adapters,
        seed=seed,
    )
    return Engine(executor, kv, intake, config, overlap=overlap, trace=trace)
