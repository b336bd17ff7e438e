"""The documentation that runs: entries of the FAQ, their snippets, and the pages that are generated from them."""
