"""Where a port departs from its reference, and why: modules run isolated, mutations of the reference tried."""
