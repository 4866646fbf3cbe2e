"""What a model card says of a model's attention: who reads whom, drawn and in numbers, and what that costs."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.attention.explain_layers import explain_layers
from hf_efficient_attn.attention.explanation import Explanation
from hf_efficient_attn.attention.layer_patterns import FIELD, config_patterns
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.patterns.drawing import drawn
from hf_efficient_attn.patterns.expressions import write_expression
from hf_efficient_attn.patterns.pattern import Pattern

# the length of text that is described: as much as the model reads, and not more than this
MOST_TOKENS = 8192
TOKENS = 4096
# lines and columns of the drawing
SIGNS = 24
PATTERN_LETTERS = 100

TABLE = """| layers | each token reads | keys it reads, on average | time over dense attention |
|:--|:--|--:|--:|"""


def attention_text(model_or_config: Any) -> str:
    """Return the section of a model or config, in Markdown, without its heading."""
    config = getattr(model_or_config, "config", model_or_config)
    try:
        tokens = described_tokens(config)
        described = {part: explain_layers(model_or_config, tokens, part) for part in parts_of(config)}
    except EfficientAttentionError as refusal:
        pattern = pattern_of(config)
        start = "" if pattern is None else f"Its pattern is `{shown(pattern)}`. "
        return f"{start}Its cost is not known here: {refusal}"
    rows = [row(part, layers, each) for part, found in described.items() for layers, each in found]
    # the layers that read the fewest keys
    part, layers, said = min(
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
            "Times are estimates of `hf_efficient_attn.explain` for attention alone, on a CPU.",
            *(["", *notes] if notes else []),
            "",
            *drawing(said, part, layers[0], tokens),
        ]
    )


def described_tokens(config: PreTrainedConfig) -> int:
    """Return the length of text that is described: one that the patterns of all layers can have.

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
    """Return the parts of a model that have layers of self-attention; None: it has no parts."""
    return (ENCODER, DECODER) if config.get_text_config().is_encoder_decoder else (None,)


def pattern_of(config: PreTrainedConfig) -> Any:
    """Return the `attention_pattern` of a config, or of its text part."""
    return getattr(config, FIELD, None) or getattr(config.get_text_config(), FIELD, None)


def row(part: str | None, layers: list[int], said: Explanation) -> str:
    """Return a line of the table."""
    where = f"{part} {numbers(layers)}" if part else numbers(layers)
    text = reading(said).replace("|", "\\|")
    keys = said.allowed_pairs / (said.num_heads * said.call.layout.num_queries)
    return f"| {where} | {text} | {keys:,.1f} | {said.relative_cost:.3f} × {said.baseline} |"


def reading(said: Explanation) -> str:
    """Return what a token reads, in Markdown: patterns of all heads, and whether keys are chosen among them."""
    is_gathered = "" if said.call.chosen is None else f" keys chosen by what tokens say ({said.backend})"
    heads = "" if said.beside is None else f"{said.call.layout.num_heads} of {said.num_heads} heads: "
    others = "" if said.beside is None else f"; the other {said.beside.num_heads}: {reading(said.beside)}"
    return f"{heads}`{expression(said.pattern)}`{',' * bool(is_gathered)}{is_gathered}{others}"


def numbers(layers: list[int]) -> str:
    """Return indices as text, neighbours joined.

    >>> numbers([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def expression(pattern: Pattern) -> str:
    """Return a pattern as an expression, cut where it is long."""
    return cut(write_expression(pattern), PATTERN_LETTERS, PATTERN_LETTERS // 4)


def drawing(said: Explanation, part: str | None, layer: int, tokens: int) -> list[str]:
    """Return the lines of a pattern's drawing, and what they mean."""
    pattern = said.pattern if said.beside is None else said.beside.pattern
    step = -(-tokens // SIGNS)
    try:
        drawn_text = drawn(pattern, tokens, None, layer, 0, 0, step)
    except EfficientAttentionError as refusal:
        return [f"It is not drawn: {refusal}"]
    where = f"Layer {layer}{f' of the {part}' if part else ''}{', head 0' if pattern.num_head_patterns > 1 else ''}"
    return [
        f"{where}: a line a query, a column a key. Each sign is {step:,} × {step:,} tokens, ■ where any key is read.",
        "",
        "```text",
        drawn_text,
        "```",
    ]
