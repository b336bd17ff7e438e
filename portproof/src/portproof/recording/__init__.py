"""A reference recorded in a file, so that judging a port no longer needs it."""
