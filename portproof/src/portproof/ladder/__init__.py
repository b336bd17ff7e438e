"""The rungs: each takes what two sides made of the same thing and says whether they agree."""
