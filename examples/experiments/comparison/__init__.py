"""What the experiments share: text, training, scores, and what a run leaves."""
