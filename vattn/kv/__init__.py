"""KV-cache backends under one contract: `virtual`, `paged`, `static`."""
