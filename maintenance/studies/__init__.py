"""Studies that were made once, each a page of docs/: pairs of library models, ports that a program wrote."""
