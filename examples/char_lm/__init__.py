"""The parts of `train_char_lm.py`."""
