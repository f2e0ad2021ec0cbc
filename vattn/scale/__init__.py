"""More than one engine: sharing a device's memory."""
