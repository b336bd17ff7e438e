"""A verdict or a run of the ladder for people and machines: text, page, plots, summary."""
