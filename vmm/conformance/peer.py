"""The second process of the rules about sharing: it imports a descriptor and runs commands from stdin.

python -m ...conformance.peer DEVICE OPTIONS FD BYTES        answers each line with one number
read           the value that every byte has (256: they differ)
write VALUE    fills the memory; answers VALUE
"""

from __future__ import annotations

import json
import sys

from ..driver import Access
from .sandbox import DriverSpec


def main(device: str, options: str, fd: str, size: str) -> None:
    """Serve until stdin ends."""
    import torch

    driver = DriverSpec(device, json.loads(options)).open()
    length = int(size)
    handle = driver.import_handle(int(fd), length)
    va = driver.reserve(length)
    driver.map(va, length, handle)
    driver.set_access(va, length, Access.READ_WRITE)
    memory = driver.tensor(va, (length,), (1,), torch.uint8)
    for line in sys.stdin:
        command, *values = line.split()
        if command == "write":
            memory.fill_(int(values[0]))
            driver.synchronize()
        low, high = int(memory.min()), int(memory.max())
        print(low if low == high else 256, flush=True)
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
