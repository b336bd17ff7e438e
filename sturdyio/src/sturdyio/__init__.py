"""Files written whole or not at all, files read without running anything, folder locks, one line for a user's mistake.

It knows no model, and importing it imports no framework.
"""
