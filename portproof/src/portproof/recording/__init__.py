"""A reference recorded as a file of arrays: what judging asks of it, so that it needs the reference no more."""
