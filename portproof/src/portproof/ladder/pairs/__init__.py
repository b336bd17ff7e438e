"""Two models as a pair: the map between them, what a whole pair is compared by, and what rungs of models share."""
