"""One source for both sides: command line, seeds, random draws, sample order, log line, safe files.

Nothing here imports torch or paddle, and neither package needs more of `reprod` than this folder.
"""
