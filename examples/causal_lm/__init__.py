"""The parts of `train_clm.py`."""
