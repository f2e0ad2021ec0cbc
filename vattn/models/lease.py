"""Tracks the engines that use a model. The first one switches it to our attention; the last one restores it.

    the caller's module   | sdpa, train |                                | sdpa, train |
                                        └ first take        last return ┘
    the engines' model                  | vattn, eval . . . . . . . . . |

A model is in use while its config names our attention. There is no other mark, so a module that shares a
config with a model in use, or is a copy of one, counts as in use too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vattn.errors import ConfigError, ModelChanged
from vattn.interrupts import interrupts_held
from vattn.models.attention import ATTENTION_NAME, register_attention
from vattn.models.rope import Stretched, stretch
from vattn.models.spec import text_config


class ModuleLease:
    """Counts the engines that use one model. Thread-safe.

    `ours` means that the model was loaded with our attention, so no other code can be using it.
    """

    def __init__(self, model: PreTrainedModel, *, ours: bool) -> None:
        self.model = model
        self._ours = ours
        self._loans = 0
        self._attention: list[tuple[PreTrainedConfig, Any]] = []
        """Configs, each with the attention that it named before."""
        self._training: list[nn.Module] = []
        """Modules that were in training mode before the first engine took the model."""
        self._rotary: list[Stretched] = []
        # Reentrant: the garbage collector may return a loan in the middle of another call.
        self._lock = threading.RLock()

    def take(self, *, stretched: bool = False) -> Loan:
        """Prepare the model for one more engine. Raises ConfigError if another owner uses it.

        `stretched`: give dynamic rotary scaling the frequencies of its longest sequence
        (`vattn.models.rope`).
        """
        with self._lock:
            if not self._loans and not self._ours:
                self._require_free()
            if self._loans and stretched != bool(self._rotary):
                raise ConfigError(
                    "engines that share a model with dynamic rotary scaling must all have, or all not have, "
                    "a max_model_len of more than its max_position_embeddings"
                )
            self._loans += 1
            loan = Loan(self)
            try:
                if self._loans == 1:
                    self._switch(stretched)
                loan.check()
            except BaseException:
                loan.give_back()
                raise
            return loan

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the model, and return it at the end of the block."""
        loan = self.take()
        try:
            yield
        finally:
            loan.give_back()

    def _require_free(self) -> None:
        if any(config._attn_implementation == ATTENTION_NAME for config in _configs(self.model)):
            raise ConfigError(
                f"this {type(self.model).__name__} serves an LLM already, or shares its config with a model "
                "that does: close that LLM first, or let several share load_model(model). If no LLM uses it, "
                "give it another attention: model.set_attn_implementation('sdpa')"
            )

    def _switch(self, stretched: bool) -> None:
        register_attention()
        self._attention = [(config, config._attn_implementation) for config in _configs(self.model)]
        self._training = [module for module in self.model.modules() if module.training]
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.model.eval()
        if stretched:
            self._rotary = stretch(self.model)

    def _return(self) -> None:
        with self._lock:
            self._loans -= 1
            if self._loans:
                return
            for config, before in self._attention:
                if config._attn_implementation == ATTENTION_NAME:  # else it was changed since
                    # Not through the property, which would set the configs inside this one too.
                    config._attn_implementation_internal = before
            for module in self._training:
                module.training = True
            for rotary in self._rotary:
                rotary.undo()
            self._attention, self._training, self._rotary = [], [], []


class Loan:
    """One engine's use of a model. It ends with `give_back`, or when it is garbage collected."""

    def __init__(self, lease: ModuleLease) -> None:
        self._model = lease.model
        self._config: PreTrainedConfig = text_config(lease.model.config)
        self._end = weakref.finalize(self, lease._return)

    def check(self) -> None:
        """Raise ModelChanged unless the model still computes what the engine needs. Very cheap."""
        if self._config._attn_implementation != ATTENTION_NAME:
            now = self._config._attn_implementation
            raise ModelChanged(
                f"the model's attention was set to {now!r} while an LLM uses it: "
                f"go on with model.set_attn_implementation({ATTENTION_NAME!r}), or close the LLM"
            )
        if self._model.training:
            raise ModelChanged(
                "the model was put into training mode while an LLM uses it: go on with model.eval(), or "
                "close the LLM"
            )

    def give_back(self) -> None:
        """Return the model, because the engine no longer needs it. Idempotent."""
        with interrupts_held():  # half a return would never be finished
            self._end()


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs of all models inside, and the configs inside those; each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            inner = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [each for each in inner if isinstance(each, PreTrainedConfig)]
    return list(found.values())
