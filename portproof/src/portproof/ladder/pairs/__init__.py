"""Pairs of models: their inputs, how they are compared, and what rungs share."""
