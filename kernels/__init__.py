"""Attention kernels over contiguous ranges and block tables. Know nothing of memory managers."""
