"""Two models as a pair: what they are run on, how they are compared, and what rungs of models share."""
