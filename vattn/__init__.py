"""vattn: one inference engine, switchable KV-cache backends (`virtual`, `paged`, `static`)."""
