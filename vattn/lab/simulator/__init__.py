"""Simulation: the real scheduler and KV managers over a driver without memory, a cost model for the rest."""
