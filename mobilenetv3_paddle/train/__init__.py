"""Criterion, metric, optimizer, schedule, engine, checkpoints and the training command."""
