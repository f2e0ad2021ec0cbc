"""Attention kernels over contiguous ranges and block tables. They know nothing of memory managers."""
