"""What belongs to neither framework: `recipe` is shared by both packages, `align` proves one against the other."""

import warnings

# Paddle looks for a compiler cache when it is imported, and warns on every run of every command where there is none.
warnings.filterwarnings("ignore", message="No ccache found")
