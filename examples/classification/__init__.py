"""The parts of `classify_documents.py`."""
