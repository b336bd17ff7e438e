"""Record, compare, locate: what proves a port against its reference. Ship the port without it."""
