"""The command `portproof`: a module a subcommand, which reads its flags and prints."""
