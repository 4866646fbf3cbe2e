"""The parts of `convert_checkpoint.py`; `continue_mlm.py` converts the same checkpoint."""
