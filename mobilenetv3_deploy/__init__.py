"""Exported models: what travels with one, its preprocessing, and the engines that run it.

No framework and no engine is imported before one is asked for.
"""
