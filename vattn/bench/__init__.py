"""Measuring: workloads, runs, comparisons."""
