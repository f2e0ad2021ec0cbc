"""Which attention implementations can read which memory, by name."""

from __future__ import annotations

from vattn.attention.base import AttentionBackend
from vattn.attention.sdpa import ContiguousSdpa, GatherSdpa
from vattn.errors import ConfigError
from vattn.kv.base import AttentionInputs, ContiguousInputs, PagedInputs

CHOICES: dict[type[AttentionInputs], dict[str, type[AttentionBackend]]] = {
    ContiguousInputs: {"sdpa": ContiguousSdpa},
    PagedInputs: {"gather": GatherSdpa},
}


def create_attention(name: str, reads: type[AttentionInputs]) -> AttentionBackend:
    """The implementation `name` ("auto": the default) for memory of kind `reads`.

    Raises ConfigError when there is none of that name for that memory.
    """
    choices = CHOICES[reads]
    if name == "auto":
        name = next(iter(choices))
    if name not in choices:
        raise ConfigError(
            f"attention={name!r} can't read this KV memory: use {', '.join(map(repr, choices))}"
        )
    return choices[name]()
