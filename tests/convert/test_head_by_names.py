"""Checkpoints whose config names no architectures: the head is found by the names of the weights, or asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from in_tree_models import FIELDS, heads_of, in_tree, inputs_of, largest_difference
from safetensors.torch import load_file, save_file

import hf_efficient_attn as hea
from hf_efficient_attn.convert import source
from hf_efficient_attn.convert.registry import AUTO_CLASSES, head_of_class, resolve_head

TOKENS, SEQUENCES, CHOICES, ANSWERS = (
    f"AutoModelFor{head}"
    for head in ("TokenClassification", "SequenceClassification", "MultipleChoice", "QuestionAnswering")
)
# heads with weights of the same names
AMBIGUOUS = {
    **{("bert", head): {TOKENS, SEQUENCES, CHOICES} for head in (SEQUENCES, CHOICES)},
    **{(name, CHOICES): {TOKENS, CHOICES} for name in ("roberta", "xlm-roberta", "longformer")},
    **{("big_bird", head): {TOKENS, CHOICES} for head in (TOKENS, CHOICES)},
    **{("modernbert", head): {TOKENS, SEQUENCES, CHOICES, ANSWERS} for head in (TOKENS, SEQUENCES, CHOICES, ANSWERS)},
}
# the config that was published with longformer-base-4096, but for the sizes
PUBLISHED = {
    "attention_mode": "longformer",
    "attention_probs_dropout_prob": 0.1,
    "attention_window": [8, 4],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "ignore_attention_mask": False,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 82,
    "model_type": "longformer",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "sep_token_id": 2,
    "type_vocab_size": 1,
    "vocab_size": 61,
}

pytestmark = pytest.mark.filterwarnings("ignore:Left out, because (sparse|lm_head)", "ignore:Even with parity")


def save_without_architectures(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["architectures"]
    file.write_text(json.dumps(fields))
    return folder


# whose weights have the names of RoBERTa's and of BART's
LIKE_OTHERS = ("xlm-roberta", "pegasus", "marian")


@pytest.mark.parametrize(
    ("model_type", "head"),
    [pytest.param(*pair, marks=[pytest.mark.thorough] * (pair[0] in LIKE_OTHERS)) for pair in heads_of(*FIELDS)],
)
def test_every_head(model_type: str, head: str, tmp_path: Path) -> None:
    # BART's config keeps two labels out of its JSON, and reads three
    labels = {"num_labels": 3} if head == SEQUENCES else {}
    folder = save_without_architectures(in_tree(model_type, head, **labels), tmp_path / "theirs")
    if (model_type, head) not in AMBIGUOUS:
        ours = hea.convert(folder)
    else:
        with pytest.raises(hea.ConfigurationError, match=r"fit several heads: .*classifier\.weight.* Choose") as caught:
            hea.convert(folder)
        offered = set(str(caught.value).rstrip(".").rpartition(": ")[2].split(", "))
        assert offered == AMBIGUOUS[model_type, head]
        ours = hea.convert(folder, head=head)
    assert head_of_class(type(ours).__name__) == resolve_head(head)


def test_a_causal_language_model_is_one_by_its_config(tmp_path: Path) -> None:
    theirs = in_tree("big_bird", "AutoModelForCausalLM", is_decoder=True, attention_type="original_full")
    assert isinstance(
        hea.convert(save_without_architectures(theirs, tmp_path / "theirs")), hea.SparseTransformerForCausalLM
    )


def published(folder: Path, is_old_pickle: bool) -> Any:
    """Write the files that longformer-base-4096 has; return the model."""
    fields = {name: value for name, value in PUBLISHED.items() if name != "model_type"}
    theirs = in_tree("longformer", "AutoModelForMaskedLM", **fields)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if name != "lm_head.decoder.bias"}
    weights["longformer.embeddings.position_ids"] = torch.arange(82).expand(1, -1)
    weights["longformer.pooler.dense.weight"] = torch.zeros(32, 32)
    weights["longformer.pooler.dense.bias"] = torch.zeros(32)
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not is_old_pickle)
    return theirs


@pytest.mark.parametrize("is_old_pickle", [False, True])
@pytest.mark.filterwarnings("ignore:Left out, because nothing corresponds to them")
def test_the_published_longformer(tmp_path: Path, is_old_pickle: bool) -> None:
    theirs = published(tmp_path / "theirs", is_old_pickle)
    ours = hea.convert(tmp_path / "theirs", tmp_path / "ours")
    assert isinstance(ours, hea.SparseTransformerForMaskedLM)
    assert largest_difference(theirs, ours, inputs_of("longformer", "AutoModelForMaskedLM", padded=9)) < 1e-5
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert largest_difference(ours, loaded, inputs_of("longformer", "AutoModelForMaskedLM")) == 0


@pytest.mark.filterwarnings("ignore:Left out", "ignore:Newly initialized")
def test_another_head_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path / "theirs", is_old_pickle=False)
    monkeypatch.setattr(source, "find_head", lambda *_: pytest.fail("names were read"))
    assert isinstance(hea.convert(tmp_path / "theirs", head="AutoModel"), hea.SparseTransformerModel)
    ours = hea.convert(tmp_path / "theirs", head=SEQUENCES)
    assert isinstance(ours, hea.SparseTransformerForSequenceClassification)


def test_names_of_the_first_checkpoints(tmp_path: Path) -> None:
    folder = save_without_architectures(in_tree("bert", "AutoModelForMaskedLM"), tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(hea.convert(folder), hea.SparseTransformerForMaskedLM)


def test_names_of_no_head(tmp_path: Path) -> None:
    folder = save_without_architectures(in_tree("roberta", ANSWERS), tmp_path / "roberta")
    weights = load_file(folder / "model.safetensors")
    weights["dreams.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(hea.ConfigurationError, match="AutoModelForMaskedLM") as caught:
        hea.convert(folder)
    assert AUTO_CLASSES["ConditionalGeneration"] not in str(caught.value)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.thorough] * (name in LIKE_OTHERS)) for name in FIELDS]
)
def test_buffers_that_earlier_versions_saved(model_type: str, tmp_path: Path) -> None:
    """They are no weights: transformers makes them anew, and passes over those of a checkpoint."""
    head = "AutoModelForSeq2SeqLM" if "d_model" in FIELDS[model_type] else "AutoModelForMaskedLM"
    theirs = in_tree(model_type, head)
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    prefix = f"{theirs.base_model_prefix}."
    buffers = {
        f"{prefix}embeddings.position_ids": torch.arange(80).expand(1, -1).contiguous(),
        f"{prefix}embeddings.token_type_ids": torch.zeros(1, 80, dtype=torch.long),
        f"{prefix}encoder.version": torch.tensor([3.0]),
        f"{prefix}decoder.version": torch.tensor([3.0]),
        f"{prefix}layers.0.attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**load_file(file), **buffers}, file, metadata={"format": "pt"})
    ours = hea.convert(tmp_path / "theirs", parity=True)
    assert largest_difference(theirs, ours, inputs_of(model_type, head, 16)) < 1e-5


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = save_without_architectures(in_tree("led", ANSWERS), tmp_path / "led", max_shard_size="20kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert isinstance(hea.convert(folder), hea.SparseSeq2SeqForQuestionAnswering)


def test_damaged_or_absent_weights(tmp_path: Path) -> None:
    folder = save_without_architectures(in_tree("bert"), tmp_path / "bert")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_bytes(b"half")
        with pytest.raises(hea.CheckpointError, match=f"The file {name} of .* cannot be read"):
            hea.convert(folder)
        (folder / name).unlink()
    with pytest.raises(hea.CheckpointError, match=r"cannot be read: it has none of the files model\.safetensors"):
        hea.convert(folder)
