"""Where transformers writes a model card, those of our families and of sparsified models say what attention reads.

- `push_to_hub` writes an empty template where the repository has no card; the card of `model_card` takes its place. Of
  any other card, only what stands between our marks is written anew.
- `Trainer.create_model_card` writes its card anew each time; our part and what was measured are put into it.

`save_pretrained` to a folder writes none, as in transformers. Methods of transformers are replaced, since neither
`push_to_hub` nor Trainer asks anybody for a card.
"""

import functools
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from transformers import PreTrainedModel
from transformers.modelcard import TrainingSummary

from hf_efficient_attn.hub.card import BEGIN, END, PIPELINES, auto_class, card_data, model_card, written_part
from hf_efficient_attn.hub.stub import stub_classes

MARK = "_writes_cards"
# by which transformers describes every model that is pushed without a card
TEMPLATE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)
# before which our part stands in cards of Trainer
NEXT_HEADING = "\n## Model description\n"
# what Trainer logs beside metrics, in the words of its cards
NO_METRICS = ("Epoch", "Model Preparation Time", "Runtime", "Samples Per Second", "Step", "Steps Per Second")
UNKNOWN = "unknown"
# the attribute in which a summary keeps the model of its Trainer, and its name on the Hub
MODEL = "_model_of_trainer"


def write_cards() -> None:
    """Have pushed models and Trainer write our cards; may be called again."""
    if getattr(PreTrainedModel._upload_modified_files, MARK, False):
        return
    model_class: Any = PreTrainedModel
    summary_class: Any = TrainingSummary
    model_class._upload_modified_files = with_card(PreTrainedModel._upload_modified_files)
    summary_class.from_trainer = classmethod(with_model(summary_class.from_trainer.__func__))
    summary_class.to_model_card = with_attention(TrainingSummary.to_model_card)


def with_card(upload: Any) -> Any:
    """Return a model's `_upload_modified_files` that first writes what is ours in the card beside the files."""

    @functools.wraps(upload)
    def uploading(model: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        file = Path(working_dir) / REPOCARD_NAME
        if file.is_file() and has_part(model):
            write_card(file, model, repo_id)
        return upload(model, working_dir, repo_id, *args, **kwargs)

    setattr(uploading, MARK, True)
    return uploading


def has_part(model: Any) -> bool:
    """Return whether a model has a part of ours in its card; an adapter does not carry the pattern of its base."""
    is_adapter = getattr(model, "_hf_peft_config_loaded", False)
    return isinstance(model, PreTrainedModel) and bool(stub_classes(model.config)) and not is_adapter


def write_card(file: Path, model: Any, repo_id: str) -> None:
    """Write a card in place of transformers' template, or what stands between our marks, or nothing."""
    card: Any = ModelCard.load(file)
    if card.text.strip() == template_text():
        known = {name: value for name, value in card.data.to_dict().items() if name != "library_name"}
        model_card(model, repo_id, **known).save(file)
    elif BEGIN in card.text and END in card.text:
        card.text = between_marks(card.text, written_part(model, repo_id))
        card.save(file)


@functools.cache
def template_text() -> str:
    """Return the text of the card that transformers pushes where there is none."""
    return str(ModelCard.from_template(ModelCardData(), model_description=TEMPLATE).text.strip())


def between_marks(text: str, part: str) -> str:
    """Return a card's text with another part between the marks.

    >>> between_marks(f"before{BEGIN}old{END}after", "new")
    'beforenewafter'
    """
    before, _, rest = text.partition(BEGIN)
    return before + part + rest.partition(END)[2]


def with_model(from_trainer: Any) -> Any:
    """Return `TrainingSummary.from_trainer` that keeps the model, if it has a part of ours in its card."""

    @functools.wraps(from_trainer)
    def summing_up(cls: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        summary = from_trainer(cls, trainer, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if has_part(model):
            setattr(summary, MODEL, (model, getattr(trainer, "hub_model_id", None)))
        return summary

    return summing_up


def with_attention(to_model_card: Any) -> Any:
    """Return `TrainingSummary.to_model_card` with our part and, where transformers finds none, the results."""

    @functools.wraps(to_model_card)
    def written(summary: Any) -> str:
        text = to_model_card(summary)
        if not hasattr(summary, MODEL):
            return str(text)
        card: Any = ModelCard(text)
        model, repo_id = getattr(summary, MODEL)
        ours = card_data(model, repo_id, (), {"tags": card.data.tags})
        card.data.tags, card.data.pipeline_tag = ours.tags, ours.pipeline_tag
        card.data.eval_results = card.data.eval_results or results_of(summary, model)
        before, heading, after = card.text.partition(NEXT_HEADING)
        card.text = f"{before}\n{written_part(model, repo_id)}\n{heading}{after}"
        return str(card)

    return written


def results_of(summary: Any, model: Any) -> list[EvalResult]:
    """Return the last evaluation of a Trainer; of data without a name, as sentence-transformers says it."""
    data = _first(summary.dataset_tags) or UNKNOWN
    described = _first(summary.dataset_metadata) or {}
    return [
        EvalResult(
            task_type=PIPELINES.get(auto_class(model)) or UNKNOWN,
            dataset_type=data,
            dataset_name=_first(summary.dataset) or data.capitalize(),
            dataset_config=described.get("config"),
            dataset_split=described.get("split"),
            metric_type=name.lower().replace(" ", "_"),
            metric_name=name,
            metric_value=value,
        )
        for name, value in _metrics(summary.eval_results or {}).items()
    ]


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    """Return the metrics among what was logged in an evaluation, by the words of Trainer's cards."""
    named = {
        " ".join(part.capitalize() for part in name.removeprefix("eval_").split("_")): found[name] for name in found
    }
    return {name: value for name, value in named.items() if name not in NO_METRICS and isinstance(value, int | float)}


def _first(value: Any) -> Any:
    return value if isinstance(value, str) or not value else value[0]
