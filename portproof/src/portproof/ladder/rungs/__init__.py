"""The rungs as functions, a file a subject: each takes both sides and compares what they make of the same thing."""
