"""What the scripts of tests and examples import, once for all of them: the server of `forked.py` has it."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets  # noqa: E402, F401
import evaluate  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import peft  # noqa: E402, F401
import sentence_transformers.sentence_transformer.evaluation  # noqa: E402, F401
import sklearn.feature_extraction.text  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401
import transformers.trainer  # noqa: E402, F401
import transformers.trainer_seq2seq  # noqa: E402, F401

import hf_efficient_attn  # noqa: E402, F401

# a process that has computed with several threads cannot be forked
torch.set_num_threads(1)
