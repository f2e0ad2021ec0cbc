"""`VirtualCache`: a KV cache for transformers' `generate` that grows in place.

layout.py    the address ranges of a layer, and the strides over them
source.py    driver and page pool of a device
tape.py      tokens in ranges that grow (`Tape`) or wrap around (`Ring`)
layers.py    full attention
sliding.py   sliding windows
moves.py     reordering a batch in place
cache.py     the cache
"""

from __future__ import annotations

from vattn.hf.cache import VirtualCache

__all__ = ["VirtualCache"]
