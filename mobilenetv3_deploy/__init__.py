"""Exported models: what travels with one, its preprocessing, and the engines that run it.

No framework and no engine is imported before one is asked for.
"""

import warnings

# Paddle looks for a compiler cache when it is imported, and warns on every run where there is none.
warnings.filterwarnings("ignore", message="No ccache found")
