"""Adapters between a step's memory plan and the kernels that can read it."""
