"""Weights from one framework to another: layout rules by layer type."""
