"""The parts of `summarize_man_pages.py` and `translate_help.py`."""
