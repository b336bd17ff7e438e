"""What is random, judged by its distribution. Pure, NumPy and SciPy only."""
