"""BERT and RoBERTa as start values of an ETC: what is copied where, what starts anew, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from convert.test_damaged_sources import weights
from convert.test_folders import run, save
from in_tree_models import HEADS, in_tree

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated

SOURCES = {"bert": {}, "roberta": {"bos_token_id": 3}, "xlm-roberta": {"bos_token_id": 3}}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Left out, because", "ignore:Copied from", "ignore:Newly initialized", "ignore:The ETC starts"
)


def lifted(theirs: Any, **options: Any) -> Any:
    return hea.convert(theirs, to="etc_transformer", **options)


def source(model_type: str, head: str = "AutoModel", **changes: Any) -> Any:
    return in_tree(model_type, head, **{**SOURCES[model_type], **changes})


def without_distances(theirs: Any, ours: Any) -> None:
    """Take away what the two do not have in common: absolute positions there, labels here."""
    for name, parameter in [*theirs.named_parameters(), *ours.named_parameters()]:
        if "position_embeddings" in name or "_labels." in name:
            torch.nn.init.zeros_(parameter)


@pytest.mark.parametrize("global_projections", [None, False])
@pytest.mark.parametrize("model_type", SOURCES)
def test_without_distances_it_is_the_source_that_reads_both_inputs(
    model_type: str, global_projections: bool | None
) -> None:
    """With a band as long as the text, of any number of global tokens, with padding."""
    theirs = source(model_type).double()
    ours = lifted(theirs, attention_window=60, global_projections=global_projections)
    without_distances(theirs, ours)
    generator = torch.Generator().manual_seed(1)
    ids, global_ids = (torch.randint(7, 61, (2, size), generator=generator) for size in (30, 3))
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, 20:], types[:, 8:] = 0, 1
    with torch.no_grad():
        found = ours(ids, mask, token_type_ids=types, global_input_ids=global_ids)
        joined = torch.cat((torch.ones_like(global_ids), mask), 1)
        both = theirs(torch.cat((global_ids, ids), 1), joined, torch.cat((torch.zeros_like(global_ids), types), 1))
    torch.testing.assert_close(found.global_hidden_state, both.last_hidden_state[:, :3])
    real = mask.bool()
    torch.testing.assert_close(found.last_hidden_state[real], both.last_hidden_state[:, 3:][real])


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize(
    "head", ["AutoModelForMaskedLM", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"]
)
def test_heads_over_tokens_come_with_it(model_type: str, head: str) -> None:
    """Where no types are given, long tokens have the first, as they have it there."""
    theirs = source(model_type, head, hidden_act="relu")
    ours = lifted(theirs, attention_window=40)
    without_distances(theirs, ours)
    ids = torch.arange(7, 25).view(1, -1)
    token = ours.config.global_token_id
    with torch.no_grad():
        found = ours(ids, global_input_ids=torch.tensor([[token]]))[0]
        both = theirs(torch.cat((torch.tensor([[token]]), ids), 1))[0]
    torch.testing.assert_close(found, both[:, 1:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_made_and_its_weights_are_those_of_the_source(head: str) -> None:
    theirs = source("bert", head)
    ours = lifted(theirs)
    maps = {"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"}
    if head.endswith(("SequenceClassification", "MultipleChoice")):
        for mine, name in maps.items():
            name = f"bert.{name}" if "pooler" in name else name
            assert ours.get_submodule(mine).weight.equal(theirs.get_submodule(name).weight)
    assert (
        ours(torch.arange(7, 49).view(1, 1, 42) if "Choice" in head else torch.arange(7, 49).view(1, 42))[0]
        .isfinite()
        .all()
    )


def test_what_starts_anew_and_what_is_said_of_it() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Train it further") as caught:
        ours = lifted(source("bert"))
    message = "\n".join(str(each.message) for each in caught)
    assert "Left out, because etc_transformer has no such weights: embeddings.position_embeddings.weight" in message
    assert (
        "Newly initialized in EtcTransformerModel, because the source has none: layers.*.self_attn.long_labels"
        in message
    )
    assert "layers.*.self_attn.global_side.other_v_proj (2)" in message
    for layer in ours.layers:
        for table in (layer.self_attn.long_labels, layer.self_attn.global_labels):
            assert not table.biases.any()
            assert 0.35 < table.vectors.std() < 0.5
            assert table.vectors.abs().max() <= 1


def test_copies_are_learned_apart_and_keep_their_dtype() -> None:
    ours = lifted(source("bert").bfloat16())
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    places = [parameter.data_ptr() for parameter in ours.parameters()]
    assert len(set(places)) == len(places)
    shared = lifted(source("bert"), global_projections=False)
    assert shared.num_parameters() < ours.num_parameters()
    assert shared.layers[0].self_attn.global_side is None


def test_bands_and_patterns() -> None:
    assert lifted(source("bert")).config.local_radius == 84
    assert lifted(source("bert"), attention_window=338).config.local_radius == 169
    assert lifted(source("bert"), pattern="band(3, 3)").layers[0].self_attn.layer_spec().pattern == Band(3, 3)
    ours = lifted(source("bert"), pattern=[Band(1, 1), Dilated(4, 4, 2)], max_position_embeddings=60)
    assert ours.config.max_position_embeddings == 60
    assert ours.layers[1].self_attn.layer_spec().pattern == Dilated(4, 4, 2)


def test_global_tokens_begin_as_tokens_that_are_no_padding() -> None:
    assert lifted(source("bert", pad_token_id=0)).config.global_token_id == 1
    assert lifted(source("bert", pad_token_id=1)).config.global_token_id == 0
    assert lifted(source("roberta")).config.global_token_id == 3


@pytest.mark.parametrize(
    ("model_type", "changes", "options", "message"),
    [
        ("bert", {}, {"parity": True}, "parity=True"),
        ("bert", {}, {"attention_window": 7}, "attention_window=7"),
        ("bert", {}, {"attention_window": 8, "pattern": "band(3, 3)"}, "exclude each other"),
        ("bert", {}, {"max_target_position_embeddings": 8}, "is for encoder-decoders"),
        ("bert", {"is_decoder": True}, {}, "encoders with absolute positions can be converted"),
        ("roberta", {"bos_token_id": None}, {}, "bos_token_id=None"),
        ("roberta", {"bos_token_id": 1}, {}, "bos_token_id"),
    ],
)
def test_what_is_refused(model_type: str, changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        lifted(source(model_type, **changes), **options)


def test_types_that_are_no_source_or_cannot_become_one() -> None:
    with pytest.raises(hea.ConfigurationError, match="sparse_transformer"):
        lifted(in_tree("longformer"))
    ours = lifted(source("bert"))
    for target in (None, "bert", "etc_transformer"):
        with pytest.raises(hea.ConfigurationError, match="etc_transformer"):
            hea.convert(ours, to=target)


def test_from_folder_to_folder_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(source("roberta", "AutoModelForMaskedLM"), tmp_path / "theirs", with_tokenizer=True)
    code, printed, notes = run(capsys, folder, tmp_path / "ours", "--to", "etc_transformer", "--attention-window", "8")
    assert code == 0, notes
    assert "EtcTransformerForMaskedLM" in printed
    assert "note: Copied from the modules that all tokens use" in notes
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert loaded.config.local_radius == 4
    again = lifted(folder, dst=tmp_path / "again", attention_window=8)
    new = {name for name in again.state_dict() if "_labels." in name}
    assert all(each.equal(again.state_dict()[name]) for name, each in loaded.state_dict().items() if name not in new)
    copy = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again")
    assert all(each.equal(again.state_dict()[name]) for name, each in copy.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "ours").model_max_length == 4096
    code, _, error = run(capsys, folder, tmp_path / "refused", "--to", "etc_transformer", "--parity")
    assert code == 2
    assert "Leave parity (--parity) out" in error
    other = lifted(folder, head="AutoModelForSequenceClassification")
    assert other.config.classifier_head == "dense"


def test_sources_may_lack_what_is_left_behind_and_nothing_else(tmp_path: Path) -> None:
    folder = save(source("bert", "AutoModelForMaskedLM"), tmp_path / "theirs")
    weights(lambda all: all.pop("bert.embeddings.position_embeddings.weight"))(folder)
    with pytest.raises(hea.CheckpointError, match="position_embeddings"):
        hea.convert(folder)
    assert lifted(folder).config.model_type == "etc_transformer"
    weights(lambda all: all.pop("bert.encoder.layer.1.output.dense.weight"))(folder)
    with pytest.raises(hea.CheckpointError, match=r"missing: bert\.encoder\.layer\.\*\.output\.dense\.weight"):
        lifted(folder)
