"""What maintainers run: fault gallery, false alarms, pairs of libraries, other processors, speed, docs."""
