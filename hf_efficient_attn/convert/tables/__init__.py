"""One table per model type of transformers: names of weights and config fields, theirs → ours."""
