"""The kinds of KV memory, one file each."""

BACKENDS = {
    "virtual": "vattn.kv.backends.virtual:VirtualBackend",
    "paged": "vattn.kv.backends.paged:PagedBackend",
    "static": "vattn.kv.backends.static:StaticBackend",
}
"""Where the class of each is. A new backend is a file and a line here."""
