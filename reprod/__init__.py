"""What belongs to neither framework: `recipe` is shared by both packages, `align` proves one against the other."""
