"""Reports of a verdict or a run: text, page, plots, summary."""
