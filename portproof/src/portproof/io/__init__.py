"""Files and commands: safe readers, atomic writers, one line for a user's mistake. Knows no model and no framework."""
