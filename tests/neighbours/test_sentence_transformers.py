"""sentence-transformers: bi-encoders and cross-encoders of every family, on texts longer than BERT reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import ENCODER_DECODERS, READERS
from neighbours.saved_models import save_model
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    # losses of sentence-transformers are its own
    pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss:UserWarning"),
]
every_family = pytest.mark.parametrize("family", READERS)
CLASSIFIERS = [name for name, case in READERS.items() if "AutoModelForSequenceClassification" in case.heads]
every_classifier = pytest.mark.parametrize("family", CLASSIFIERS)
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
STEP = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2, **QUIET}
MOST_TOKENS = 1024
POSITIONS = {"max_position_embeddings": MOST_TOKENS + 2}
WORDS = [f"w{number % 50}" for number in range(MOST_TOKENS + 200)]
SHORT, LONG = "w1 w2 w3", " ".join(WORDS)
OTHER_END = " ".join([*WORDS[: MOST_TOKENS + 100], *["w3"] * 100])
OTHER_MIDDLE = " ".join([*WORDS[:1000], "w3", *WORDS[1001:]])


def save_reader(folder: Path, family: str, auto_class: str, **fields: Any) -> None:
    """Write a model with positions for long texts, and its tokenizer."""
    is_encoder_decoder = family in ENCODER_DECODERS
    targets = {"max_target_position_embeddings": MOST_TOKENS + 2} if is_encoder_decoder else {}
    save_model(folder, READERS[family], auto_class, **POSITIONS, **targets, **fields)


def check_what_is_read(answers: torch.Tensor, alone: torch.Tensor) -> None:
    """Check what a model says of SHORT, LONG, OTHER_END and OTHER_MIDDLE, beside each other and each alone."""
    assert answers.isfinite().all()
    torch.testing.assert_close(answers, alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(answers[2], answers[1])
    assert not torch.allclose(answers[3], answers[1], atol=1e-6, rtol=1e-6)


@every_family
def test_bi_encoders(family: str, tmp_path: Path) -> None:
    """Reads as many tokens as it is told, beside shorter texts, too; a step of training moves it; the folder loads."""
    save_reader(tmp_path / "model", family, "AutoModel")
    transformer = Transformer(str(tmp_path / "model"), max_seq_length=MOST_TOKENS)
    pooling = Pooling(transformer.get_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    texts = [SHORT, LONG, OTHER_END, OTHER_MIDDLE]
    before = model.encode(texts, convert_to_tensor=True)
    assert before.shape[1] == model.get_embedding_dimension()
    check_what_is_read(before, torch.stack([model.encode(text, convert_to_tensor=True) for text in texts]))
    rows = {"query": ["w1", "w2"], "document": [LONG, f"w2 {LONG}"]}
    SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(str(tmp_path / "run"), **STEP),
        train_dataset=Dataset.from_dict(rows),
        loss=MultipleNegativesRankingLoss(model),
    ).train()
    trained = model.encode(texts, convert_to_tensor=True)
    assert trained.isfinite().all()
    assert not torch.allclose(trained, before)
    model.save(str(tmp_path / "trained"))
    loaded = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    assert loaded.max_seq_length == MOST_TOKENS
    torch.testing.assert_close(loaded.encode(texts, convert_to_tensor=True), trained)


@every_classifier
def test_cross_encoders(family: str, tmp_path: Path) -> None:
    """As bi-encoders; of a pair, the end of the longer text is left out."""
    save_reader(tmp_path / "model", family, "AutoModelForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(tmp_path / "model"), num_labels=1, max_length=MOST_TOKENS, device="cpu")
    pairs = [(SHORT, text) for text in (SHORT, LONG, OTHER_END, OTHER_MIDDLE)]
    before = model.predict(pairs, convert_to_tensor=True)
    check_what_is_read(before, torch.stack([model.predict([pair], convert_to_tensor=True)[0] for pair in pairs]))
    rows = {"query": ["w1", "w2"], "document": [SHORT, LONG], "label": [1.0, 0.0]}
    CrossEncoderTrainer(
        model,
        CrossEncoderTrainingArguments(str(tmp_path / "run"), **STEP),
        train_dataset=Dataset.from_dict(rows),
        loss=BinaryCrossEntropyLoss(model),
    ).train()
    trained = model.predict(pairs, convert_to_tensor=True)
    assert trained.isfinite().all()
    assert not torch.allclose(trained, before)
    model.save(str(tmp_path / "trained"))
    loaded = CrossEncoder(str(tmp_path / "trained"), device="cpu")
    assert loaded.max_length == MOST_TOKENS
    torch.testing.assert_close(loaded.predict(pairs, convert_to_tensor=True), trained)
