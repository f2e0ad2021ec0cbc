"""Virtual memory, from driver calls to a growable tensor. It knows nothing of attention."""
