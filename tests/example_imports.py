"""What examples import, once for all of them: preloaded by the server that forks those of `run_example`."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets  # noqa: E402, F401
import evaluate  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import sklearn.feature_extraction.text  # noqa: E402, F401
import transformers.trainer  # noqa: E402, F401
import transformers.trainer_seq2seq  # noqa: E402, F401

import hf_efficient_attn  # noqa: E402, F401
