"""The parts of `continue_mlm.py`."""
