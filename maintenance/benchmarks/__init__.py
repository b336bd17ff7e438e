"""What the packages and a proof cost, beside what others take for the same work."""
