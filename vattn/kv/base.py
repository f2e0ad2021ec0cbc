"""Re-exports of KV cache names for older imports. New code imports each name from its own module."""

from __future__ import annotations

from vattn.kv.cache import KVCache as KVCache
from vattn.kv.inputs import AttentionInputs as AttentionInputs
from vattn.kv.inputs import Chunk as Chunk
from vattn.kv.inputs import ContiguousInputs as ContiguousInputs
from vattn.kv.inputs import PagedInputs as PagedInputs
from vattn.kv.stats import KVStats as KVStats
