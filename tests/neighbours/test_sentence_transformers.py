"""sentence-transformers: bi-encoders and cross-encoders of every family, on texts longer than any BERT reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import CONFIGS, PATTERN
from datasets import Dataset
from neighbours.saved_models import ENCODERS, save_model, save_with_tokenizer
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
from transformers import BertForSequenceClassification

import hf_efficient_attn as hea

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
every_family = pytest.mark.parametrize("family", ENCODERS)
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
STEP = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, **QUIET}
SHORT, LONG = "w1 w2 w3", " ".join(f"w{number % 50}" for number in range(60))


@every_family
def test_bi_encoders(family: str, tmp_path: Path, capability: Any) -> None:
    """A text has the same embedding alone and beside a longer one; a step of training moves it; the folder loads."""
    save_model(tmp_path / "model", ENCODERS[family], "AutoModel")
    transformer = Transformer(str(tmp_path / "model"), max_seq_length=64)
    model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    together = model.encode([SHORT, LONG], convert_to_tensor=True)
    alone = torch.stack([model.encode(text, convert_to_tensor=True) for text in (SHORT, LONG)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    rows = {"query": [f"w{row}" for row in range(4)], "document": [f"{LONG} w{row}" for row in range(4)]}
    SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(str(tmp_path / "run"), **STEP),
        train_dataset=Dataset.from_dict(rows),
        loss=MultipleNegativesRankingLoss(model),
    ).train()
    trained = model.encode([SHORT, LONG], convert_to_tensor=True)
    assert trained.isfinite().all()
    assert not torch.allclose(trained, together)
    model.save(str(tmp_path / "trained"))
    loaded = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    torch.testing.assert_close(loaded.encode([SHORT, LONG], convert_to_tensor=True), trained)
    capability(family, "sentence-transformers")


@every_family
def test_cross_encoders(family: str, tmp_path: Path, capability: Any) -> None:
    if family == "sparsified":
        config = CONFIGS["bert"]()
        config.num_labels = 1
        torch.manual_seed(0)
        save_with_tokenizer(hea.sparsify(BertForSequenceClassification(config), PATTERN), tmp_path / "model")
    else:
        save_model(tmp_path / "model", ENCODERS[family], "AutoModelForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(tmp_path / "model"), num_labels=1, max_length=64, device="cpu")
    pairs = [(SHORT, LONG), (SHORT, SHORT)]
    together = model.predict(pairs, convert_to_tensor=True)
    alone = torch.stack([model.predict([pair], convert_to_tensor=True)[0] for pair in pairs])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    rows = {"query": ["w1", "w2"] * 2, "document": [SHORT, LONG] * 2, "label": [1.0, 0.0] * 2}
    CrossEncoderTrainer(
        model,
        CrossEncoderTrainingArguments(str(tmp_path / "run"), **STEP),
        train_dataset=Dataset.from_dict(rows),
        loss=BinaryCrossEntropyLoss(model),
    ).train()
    trained = model.predict(pairs, convert_to_tensor=True)
    assert trained.isfinite().all()
    assert not torch.allclose(trained, together)
    capability(family, "sentence-transformers")
