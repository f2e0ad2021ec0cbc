"""Virtual memory, from driver calls to a growable tensor. Knows nothing of attention."""
