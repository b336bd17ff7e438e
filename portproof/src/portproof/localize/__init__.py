"""Where a port departs from its reference, and why: modules run alone, causes tried."""
