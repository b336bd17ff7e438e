"""What is random, judged by its distribution: initial weights, and whole training runs. Pure, NumPy and SciPy only."""
