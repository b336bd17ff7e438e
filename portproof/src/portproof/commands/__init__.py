"""The subcommands of `portproof`, one a module."""
