"""Checkpoints in and out: transformers' own models to our families and back, and short models made long."""
