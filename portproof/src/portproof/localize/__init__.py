"""Find where a port departs from its reference, and why."""
