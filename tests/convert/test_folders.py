"""Folders in, folders out: whole or not at all, with tokenizer and generation config; and words on what is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from in_tree_models import in_tree, inputs_of, largest_difference
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_efficient_attn as hea
from hf_efficient_attn import cli


def save(model: Any, folder: Path, with_tokenizer: bool = False) -> Path:
    model.save_pretrained(folder)
    if with_tokenizer:
        words = {f"w{number}": number for number in range(61)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w1", model_max_length=80)
        wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(in_tree("bert", "AutoModelForMaskedLM"), tmp_path / "bert", with_tokenizer=True)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_loads_by_the_auto_classes(bert: Path, tmp_path: Path) -> None:
    model = hea.convert(bert, tmp_path / "new" / "long", max_position_embeddings=1000)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "new" / "long")
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    source = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    assert largest_difference(source, loaded, inputs_of("bert", "AutoModelForMaskedLM")) < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new" / "long")
    assert tokenizer.model_max_length == 1000
    assert tokenizer("w7 w8")["input_ids"] == [7, 8]
    assert names(tmp_path) == {"bert", "new"}
    assert names(tmp_path / "new") == {"long"}


def test_generation_config_is_copied(tmp_path: Path) -> None:
    theirs = in_tree("bart", "AutoModelForSeq2SeqLM")
    theirs.generation_config.num_beams = 3
    save(theirs, tmp_path / "bart")
    hea.convert(tmp_path / "bart", tmp_path / "long")
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "long")
    assert loaded.generation_config.num_beams == 3
    ids = inputs_of("bart", "AutoModelForSeq2SeqLM")["input_ids"]
    expected = theirs.generate(ids, max_new_tokens=5)
    assert loaded.generate(ids, max_new_tokens=5).tolist() == expected.tolist()


def test_an_existing_folder_is_kept(bert: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    with pytest.raises(hea.ConfigurationError, match="taken exists, is not an empty folder"):
        hea.convert(bert, taken)
    assert names(taken) == {"thesis.txt"}
    with pytest.raises(hea.ConfigurationError, match="has no config.json"):
        hea.convert(bert, taken, overwrite=True)
    assert names(taken) == {"thesis.txt"}
    (tmp_path / "empty").mkdir()
    hea.convert(bert, tmp_path / "empty")
    assert "config.json" in names(tmp_path / "empty")


@pytest.mark.parametrize("destination", ["bert", ".", "bert/long", "link"])
def test_the_source_is_never_replaced(bert: Path, tmp_path: Path, destination: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(bert)
    before = names(bert)
    with pytest.raises(hea.ConfigurationError, match="one is inside the other"):
        hea.convert(bert, tmp_path / destination, overwrite=True)
    assert names(bert) == before


def test_destinations_that_cannot_be_folders(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for below in ("file", "file/deep/new"):
        with pytest.raises(hea.ConfigurationError, match="cannot be created, because .*file is a file"):
            hea.convert(bert, tmp_path / below, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, folder: Path) -> None:
        (folder / "half.bin").write_text("half")
        raise OSError("No space left on device")

    before = names(tmp_path)
    monkeypatch.setattr(hea.SparseTransformerForMaskedLM, "save_pretrained", fail)
    with pytest.raises(hea.CheckpointError):
        hea.convert(bert, tmp_path / "deep" / "new")
    assert names(tmp_path) == before


def test_an_unknown_head_is_refused(bert: Path) -> None:
    with pytest.raises(hea.ConfigurationError, match="AutoModel"):
        hea.convert(bert, head="AutoModelForDreams")
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "architectures": ["BertForNextSentencePrediction"]}))
    with pytest.raises(hea.ConfigurationError, match="BertForNextSentencePrediction"):
        hea.convert(bert)


@pytest.mark.filterwarnings("ignore:Left out")
def test_another_head(bert: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"Newly initialized .*: classifier\.dense\.weight, classifier\.dense\.bias, classifier\.out_proj\.weight",
    ):
        model = hea.convert(bert, head="AutoModelForSequenceClassification")
    assert isinstance(model, hea.SparseTransformerForSequenceClassification)
    with pytest.warns(UserWarning, match=r"because the head changes: .*cls\.predictions\.transform\.dense\.weight"):
        backbone = hea.convert(bert, head="AutoModel")
    assert isinstance(backbone, hea.SparseTransformerModel)


@pytest.mark.filterwarnings("ignore:.*is not kept")
def test_patterns_that_longformer_cannot_have() -> None:
    ours = hea.convert(in_tree("longformer", "AutoModelForMaskedLM"), pattern="band(8, 4)")
    with pytest.raises(hea.ConfigurationError, match="windows of longformer are equally long on both sides"):
        hea.convert(ours, to="longformer")
    with pytest.raises(hea.ConfigurationError, match="big_bird"):
        hea.convert(ours, to="big_bird")


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[Any, str, str]:
    """Return how the command ends, with 0 if it succeeds, and what it prints."""
    code: Any = 0
    capsys.readouterr()
    try:
        cli.main(["convert", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(in_tree("longformer"), tmp_path / "theirs", with_tokenizer=True)
    sizes = ("--max-position-embeddings", "200", "--pattern", "band(4, 4) | global(0)")
    code, printed, notes = run(capsys, source, tmp_path / "ours", *sizes)
    assert code == 0, notes
    assert "SparseTransformerModel" in printed
    assert "200 positions" in printed
    assert "note: Left out, because sparse_transformer has no such weights: pooler.dense.weight" in notes
    config = hea.SparseTransformerConfig.from_pretrained(tmp_path / "ours")
    assert config.max_position_embeddings == 200
    code, _, error = run(capsys, source, tmp_path / "ours")
    assert code == 2
    assert "exists and is not an empty folder" in error
    shutil.rmtree(tmp_path / "ours")
    code, _, error = run(capsys, source, tmp_path / "ours", "--attention-window", "7")
    assert code == 2
    assert "attention_window=7" in error
    assert names(tmp_path) == {"theirs"}


@pytest.mark.parametrize(("field", "value"), [("norm_position", "pre"), ("pad_token_id", None)])
def test_fields_that_longformer_cannot_have(field: str, value: str | None) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = hea.SparseTransformerConfig.longformer(attention_window=8, **sizes, **{field: value})
    with pytest.raises(hea.ConfigurationError, match=f"{field}={value!r}"):
        hea.convert(hea.SparseTransformerForMaskedLM(config), to="longformer")
