"""Who holds which unit of KV memory: decisions without memory. Imports neither torch nor a driver."""
