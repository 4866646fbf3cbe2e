"""What a saved model brings along, so that it can be loaded where this package is not imported."""
