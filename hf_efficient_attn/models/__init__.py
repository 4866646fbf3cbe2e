"""Model families, one folder each; `register` makes them known to the Auto classes."""
