"""The backends of the KV cache, one file each."""

BACKENDS = {
    "virtual": "vattn.kv.backends.virtual:VirtualBackend",
    "paged": "vattn.kv.backends.paged:PagedBackend",
    "static": "vattn.kv.backends.static:StaticBackend",
}
"""Backend name -> "module:class". A new backend is one file and one line here."""
