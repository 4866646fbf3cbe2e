"""The parts of `answer_questions.py`."""
