"""Files: written so that either the whole file appears or none, and read without running anything; folder locks.

A user's mistake is one line. It knows no model, and importing it imports no framework.
"""
