"""Convert checkpoints of transformers to our families and back, and make short models long."""
