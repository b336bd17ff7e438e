"""One source for both sides: command line, seeds, random draws, sample order, log line.

Nothing here imports torch or paddle, and neither package needs more than this folder and `sturdyio`.
"""
