"""The rungs as functions, a file a subject."""
