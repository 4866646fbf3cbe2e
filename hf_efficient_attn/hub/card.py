"""Model cards of families and of models with a pattern: what each token attends to, in numbers and drawn; the cost."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from hf_efficient_attn.attention.explanation import Explanation
from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError
from hf_efficient_attn.hub.copies import has_copy
from hf_efficient_attn.hub.stub import family_classes, stub_classes
from hf_efficient_attn.integration.explain import explain_layers, numbers
from hf_efficient_attn.integration.layer_patterns import DECODER, ENCODER, FIELD, config_patterns
from hf_efficient_attn.integration.names import has_indexer
from hf_efficient_attn.integration.saving import is_in_tree, stock_name
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.patterns.config_spec import write_expression
from hf_efficient_attn.patterns.pattern import Pattern, drawn

# number of tokens that a card describes: the model's longest input, at most MOST_TOKENS; TOKENS if it is not known
MOST_TOKENS = 8192
TOKENS = 4096
# lines and columns of the drawing
SIGNS = 24
PATTERN_LETTERS = 100

TABLE = """| layers | each token attends to | keys per token, on average | time compared with dense attention |
|:--|:--|--:|--:|"""


def attention_text(model_or_config: Any) -> str:
    """Return the attention section of a card, in Markdown, without its heading."""
    config = getattr(model_or_config, "config", model_or_config)
    try:
        tokens = described_tokens(config)
        described = {part: explain_layers(model_or_config, tokens, part) for part in parts_of(config)}
    except EfficientAttentionError as refusal:
        pattern = pattern_of(config)
        start = "" if pattern is None else f"Its pattern is `{shown(pattern)}`. "
        return f"{start}The cost of its attention is not known here: {refusal}"
    rows = [row(part, layers, each) for part, found in described.items() for layers, each in found]
    # the layers whose patterns allow the smallest share of all pairs are drawn
    part, layers, explanation = min(
        ((part, *each) for part, found in described.items() for each in found), key=lambda each: each[2].density
    )
    notes = dict.fromkeys(note for found in described.values() for _, each in found for note in each.notes)
    return "\n".join(
        [
            f"In a text of {tokens:,} tokens:",
            "",
            TABLE,
            *rows,
            "",
            "Times are estimates of `hf_efficient_attn.explain` for attention only, on a CPU.",
            *(["", *notes] if notes else []),
            "",
            *drawing(explanation, part, layers[0], tokens),
        ]
    )


def described_tokens(config: PreTrainedConfig) -> int:
    """Return the number of tokens that a card describes, which the patterns of all layers allow.

    >>> from transformers import BertConfig
    >>> described_tokens(BertConfig())
    512
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokens = min(longest, MOST_TOKENS) if isinstance(longest, int) and longest > 0 else TOKENS
    spec = pattern_of(config)
    for part in parts_of(config) if spec is not None else ():
        for pattern in config_patterns(spec, config.get_text_config(), part or ENCODER) or ():
            tokens = tokens if pattern is None else pattern.fitting_length(tokens)
    return tokens


def parts_of(config: PreTrainedConfig) -> tuple[str | None, ...]:
    """Return the parts of a model that have self-attention layers; `(None,)` for a model without parts."""
    return (ENCODER, DECODER) if config.get_text_config().is_encoder_decoder else (None,)


def pattern_of(config: PreTrainedConfig) -> Any:
    """Return the `attention_pattern` of a config, or of its text part."""
    return getattr(config, FIELD, None) or getattr(config.get_text_config(), FIELD, None)


def row(part: str | None, layers: list[int], explanation: Explanation) -> str:
    """Return a row of the table."""
    where = f"{part} {numbers(layers)}" if part else numbers(layers)
    text = reading(explanation).replace("|", "\\|")
    keys = explanation.allowed_pairs / (explanation.num_heads * explanation.call.layout.num_queries)
    return f"| {where} | {text} | {keys:,.1f} | {explanation.relative_cost:.3f} × {explanation.baseline} |"


def reading(explanation: Explanation) -> str:
    """Return what a token attends to, in Markdown: the patterns of all heads, and whether their keys are selected."""
    selected = "" if explanation.call.chosen is None else f", keys selected by content ({explanation.backend})"
    text, others = f"`{expression(explanation.pattern)}`{selected}", explanation.beside
    if others is None:
        return text
    heads = f"{explanation.call.layout.num_heads} of {explanation.num_heads} heads"
    return f"{heads}: {text}; the other {others.num_heads}: {reading(others)}"


def expression(pattern: Pattern) -> str:
    """Return a pattern as an expression, cut if it is long."""
    return cut(write_expression(pattern), PATTERN_LETTERS, PATTERN_LETTERS // 4)


def drawing(explanation: Explanation, part: str | None, layer: int, tokens: int) -> list[str]:
    """Return the lines of a pattern's drawing and of its legend."""
    pattern = explanation.pattern if explanation.beside is None else explanation.beside.pattern
    step = -(-tokens // SIGNS)
    try:
        drawn_text = drawn(pattern, tokens, None, layer, 0, 0, step)
    except EfficientAttentionError as refusal:
        return [f"The pattern is not drawn: {refusal}"]
    where = f"Layer {layer}{f' of the {part}' if part else ''}{', head 0' if pattern.num_head_patterns > 1 else ''}"
    return [
        f"{where}: a row is a query, a column is a key. Each sign stands for {step:,} × {step:,} tokens, and is ■ if "
        "any of their pairs is allowed.",
        "",
        "```text",
        drawn_text,
        "```",
    ]


PACKAGE_TAG = "hf_efficient_attn"
TAGS = ("efficient-attention", PACKAGE_TAG)
# marks around the part that is rewritten at every push of a family's model
BEGIN = "<!-- hf_efficient_attn writes this part anew at every push; take these two marks away to keep yours -->"
END = "<!-- end of what hf_efficient_attn writes -->"
# description that transformers writes into the card of a model that is pushed without one
TEMPLATE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# the first Auto class that loads a model's class decides; BART is also listed as a masked language model
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    # summarization or translation: a config does not say which
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModel": "feature-extraction",
}


def model_card(
    model_or_config: Any, repo_id: str | None = None, results: Sequence[EvalResult] = (), **metadata: Any
) -> ModelCard:
    """Return the model card of a model or config: its attention and what it costs, its results, how to load it.

    `model_card(model, name).push_to_hub(name)` writes it to the Hub. `push_to_hub` of a family's model also does so if
    the repository has no card.

    >>> from hf_efficient_attn.models.sparse_transformer import SparseTransformerConfig, SparseTransformerForMaskedLM
    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    >>> model = SparseTransformerForMaskedLM(SparseTransformerConfig.sliding(**sizes, left=64))
    >>> card = model_card(model, "you/model", license="apache-2.0")
    >>> card.data.pipeline_tag, card.data.license
    ('fill-mask', 'apache-2.0')
    >>> next(line for line in card.text.splitlines() if "band" in line).split(" | ")[1:3]
    ['`band(64, 64)`', '128.0']

    Args:
        model_or_config: a model or config of this package, or of transformers with a pattern.
        repo_id: the name on the Hub, for the title and the command that loads it.
        results: measured results, for the card and its `model-index`.
        metadata: metadata of the card, as for `huggingface_hub.ModelCardData`: license, language, datasets, base_model,
            ….

    Raises:
        ConfigurationError: any other model; a `repo_id` that is neither a name on the Hub nor a folder.
    """
    config: Any = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig) or not stub_classes(config):
        raise ConfigurationError(
            f"model_card takes models of this package, and models of transformers with an attention_pattern, not "
            f"{type(model_or_config).__name__}. `huggingface_hub.ModelCard` makes cards for other models."
        )
    check_name(repo_id)
    title = repo_id or type(config).__name__.removesuffix("Config")
    data = card_data(model_or_config, repo_id, results, metadata)
    lines = [f"# {title.rpartition('/')[2]}", "", written_part(model_or_config, repo_id), ""]
    if results:
        lines += ["## Results", "", *results_table(results), ""]
    return ModelCard("\n".join(["---", data.to_yaml(), "---", "", *lines]))


def check_name(repo_id: str | None) -> None:
    """Raise ConfigurationError if `repo_id` is neither a valid name on the Hub nor a folder."""
    try:
        validate_repo_id(repo_id or "name")
    except HFValidationError as error:
        if not isinstance(repo_id, str) or not Path(repo_id).is_dir():
            raise ConfigurationError(
                f"repo_id is {shown(repo_id)}; it must be a name on the Hub, such as 'you/model', or an existing "
                "folder. Leave it out if there is none."
            ) from error


def card_data(
    model_or_config: Any, repo_id: str | None, results: Sequence[EvalResult], metadata: dict[str, Any]
) -> ModelCardData:
    """Return the metadata of a card."""
    config = getattr(model_or_config, "config", model_or_config)
    name = getattr(config, "_name_or_path", "") or ""
    is_on_hub = REPOSITORY.fullmatch(name) and name != repo_id and not Path(name).exists()
    found = {
        "library_name": "transformers",
        "pipeline_tag": PIPELINES.get(auto_class(model_or_config)),
        "base_model": name if is_on_hub else None,
        "model_name": (repo_id or type(config).__name__).rpartition("/")[2] if results else None,
        "eval_results": list(results) or None,
        **metadata,
    }
    tags = [*tags_of(model_or_config), *_listed(found.pop("tags", None))]
    return ModelCardData(**found, tags=tags)


def tags_of(model_or_config: Any) -> list[str]:
    """Return the tags of a model's family, followed by those of this package."""
    return list(dict.fromkeys([*(getattr(model_or_config, "model_tags", None) or ()), *TAGS]))


def written_part(model_or_config: Any, repo_id: str | None) -> str:
    """Return the marked part of a card: what the attention is, and how to load the model."""
    config = getattr(model_or_config, "config", model_or_config)
    [name] = _class_names(model_or_config)[:1] or [type(config).__name__]
    what = (
        "whose queries attend to keys that indexers select"
        if has_indexer(config)
        else "whose attention follows a pattern"
    )
    whose = f"of Transformers {what}" if is_in_tree(config) else "of hf_efficient_attn"
    text = ["## Attention", "", f"`{name}` is a model {whose}.", "", attention_text(model_or_config)]
    return "\n".join([BEGIN, *text, "", "## How to load it", "", *loading(model_or_config, repo_id), END])


def loading(model_or_config: Any, repo_id: str | None) -> list[str]:
    """Return the lines on how to load a model."""
    config = getattr(model_or_config, "config", model_or_config)
    auto, is_copied = auto_class(model_or_config), has_copy(config)
    trust = ", trust_remote_code=True" if is_copied else ""
    code = [
        "```python",
        f"from transformers import {auto}",
        *([] if is_copied else ["", "import hf_efficient_attn  # the package must be installed"]),
        "",
        f"model = {auto}.from_pretrained({json.dumps(repo_id or 'path/of/the/model', ensure_ascii=False)}{trust})",
        "```",
    ]
    without = (
        "The repository has the code that it needs."
        if is_copied
        else "Programs that do not import the package need `trust_remote_code=True`; the package must be installed."
    )
    engines = " vLLM and SGLang refuse the model, because they would compute full attention."
    return [*code, "", without + (engines if needs_package(config) else "")]


def needs_package(config: PreTrainedConfig) -> bool:
    """Return whether engines with their own attention, such as vLLM, would compute something else."""
    return is_in_tree(config) or not family_classes()[type(config)]["AutoModel"].is_backend_compatible()


def auto_class(model_or_config: Any) -> str:
    """Return the name of the Auto class that loads a model.

    >>> from transformers import BartConfig
    >>> auto_class(BartConfig(architectures=["BartForConditionalGeneration"], attention_pattern={"kind": "full"}))
    'AutoModelForSeq2SeqLM'
    """
    config = getattr(model_or_config, "config", model_or_config)
    names = _class_names(model_or_config)
    known = [name for name in (*PIPELINES, *stub_classes(config)) if name in stub_classes(config)]
    return next((auto for auto in known if auto != "AutoConfig" and _loads(auto, config, names)), "AutoModel")


def _class_names(model_or_config: Any) -> list[str]:
    if not isinstance(model_or_config, PreTrainedConfig):
        return [type(model_or_config).__name__]
    return [stock_name(name) for name in model_or_config.architectures or ()]


def _loads(auto: str, config: PreTrainedConfig, names: list[str]) -> bool:
    found = getattr(transformers, auto)._model_mapping[type(config)]
    return any(each.__name__ in names for each in (found if isinstance(found, tuple | list) else [found]))


def results_table(results: Sequence[EvalResult]) -> list[str]:
    """Return the lines of a table of results."""
    lines = ["| task | data | metric | value |", "|:--|:--|:--|--:|"]
    for each in results:
        data = ", ".join(filter(None, [each.dataset_name, each.dataset_split]))
        task, metric = each.task_name or each.task_type, each.metric_name or each.metric_type
        lines.append(f"| {task} | {data} | {metric} | {number(each.metric_value)} |")
    return lines


def number(value: Any) -> str:
    """Return a value as text, floats with four significant digits.

    >>> number(0.123456), number("20.0 ± 1.2")
    ('0.1235', '20.0 ± 1.2')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def fill_cards() -> None:
    """Make models of families fill in their card when they are pushed."""
    FamilyPreTrainedModel.fill_card = fill_card


def fill_card(model: Any, folder: Path, repo_id: str) -> None:
    """Replace transformers' template by our card, or the part between our marks in another card; else do nothing."""
    file = folder / REPOCARD_NAME
    # an adapter is pushed without its base model, whose attention the card would describe
    if getattr(model, "_hf_peft_config_loaded", False) or not file.is_file():
        return
    card: Any = ModelCard.load(file)
    if card.text.strip() == template_text():
        known = {name: value for name, value in card.data.to_dict().items() if name != "library_name"}
        model_card(model, repo_id, **known).save(file)
    elif BEGIN in card.text and END in card.text:
        before, _, rest = card.text.partition(BEGIN)
        card.text = before + written_part(model, repo_id) + rest.partition(END)[2]
        card.save(file)


@functools.cache
def template_text() -> str:
    """Return the text of the card that transformers pushes for a model without one."""
    return str(ModelCard.from_template(ModelCardData(), model_description=TEMPLATE).text.strip())
