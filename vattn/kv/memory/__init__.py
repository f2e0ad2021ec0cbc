"""Memories: they carry out the operations of the books on a device."""
