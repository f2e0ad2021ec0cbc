"""Measure the calls of a driver. `vattn vmm bench` prints the tables.

calls.py     every call, by page size and number of pages
overlap.py   mapping in the background while the device computes
"""
