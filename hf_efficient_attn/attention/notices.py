"""Warnings that users of the "efficient" attention get once."""
