"""Tensors that grow in place: an index of embeddings, a replay buffer and a log.

    python examples/growing_tensor.py

Growing copies nothing, and the memory used is that of the rows, rounded up to a page.
"""

from __future__ import annotations

import torch

from vattn import GrowableTensor


def embeddings() -> None:
    """Embeddings arrive in batches; a search reads all of them as one tensor."""
    index = GrowableTensor((256,), torch.float32, max_rows=50_000_000)  # 51 GB of addresses, no memory
    address = index.data_ptr()
    for _ in range(20):
        index.append(torch.nn.functional.normalize(torch.randn(500, 256)))
    query = index.view()[4321]
    best = (index.view() @ query).topk(3).indices
    assert best[0] == 4321 and index.data_ptr() == address
    print(
        f"embeddings: {len(index):,} rows in {index.nbytes_mapped:,} bytes; nearest to 4321: {best.tolist()}"
    )


def replay_buffer() -> None:
    """Transitions of episodes; a view taken early goes on showing what it showed."""
    states = GrowableTensor((4,), torch.float32, max_rows=1 << 30)
    rewards = GrowableTensor((), torch.float32, max_rows=1 << 30)
    states.append(torch.randn(100, 4))
    rewards.append(torch.randn(100))
    early = states.view()
    for _ in range(50):
        states.append(torch.randn(100, 4))
        rewards.append(torch.randn(100))
    batch = torch.randint(len(states), (32,))
    print(f"replay buffer: {len(states):,} steps; a batch {list(states.view()[batch].shape)}")
    assert early.data_ptr() == states.data_ptr() and len(early) == 100
    del early  # no view may look at rows that are cut off
    states.shrink(len(states) - 200)  # keep the first 200
    rewards.shrink(len(rewards) - 200)
    print(f"  after shrink: {states.nbytes_mapped + rewards.nbytes_mapped:,} bytes")


def log() -> None:
    """One number at a time; the mean of all of them without a list."""
    with GrowableTensor((), torch.float64, max_rows=1 << 32) as losses:
        for step in range(1000):
            losses.grow(1)
            losses.view()[-1] = 1 / (1 + step)
        print(f"log: {len(losses):,} losses, mean {losses.view().mean():.4f}")


if __name__ == "__main__":
    embeddings()
    replay_buffer()
    log()
