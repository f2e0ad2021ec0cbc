"""What carries out the books' operations on a device."""
