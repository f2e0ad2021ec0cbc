"""Models from transformers: loading, the support matrix, the attention hook."""
