"""What the configs of the sparse families share: their pattern, and the checks of fields that exclude each other."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import checked_spec, config_patterns
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER, PARTS
from hf_efficient_attn.attention.pattern_direction import directed
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.global_tokens.rules import NOT_RELATIVE, check_rule
from hf_efficient_attn.patterns.pattern import Pattern


def write_pattern(config: Any) -> None:
    """Write `attention_pattern` in JSON types, after checking that the config's layers can have it.

    Raises:
        ConfigurationError: a pattern of unknown form or for another number of layers or heads, one that the
            direction of its layers excludes, or global tokens beyond the end of the position table.
    """
    if config.attention_pattern is not None:
        config.attention_pattern = checked_spec(config.attention_pattern, config)
        check_shared_heads(config)
        check_directions(config)
        check_pattern_positions(config)


def check_shared_heads(config: Any) -> None:
    """Raise ConfigurationError for patterns that the heads of a layer cannot share evenly."""
    for part in PARTS:
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            pattern.heads(config.num_attention_heads)


def check_directions(config: Any) -> None:
    """Raise ConfigurationError for a pattern that layers cannot have that read the past, or both directions."""
    directions = {ENCODER: False, DECODER: True}
    if not config.is_encoder_decoder:
        directions = {ENCODER: config.is_causal}
    for part, is_causal in directions.items():
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            directed(pattern, is_causal)


def check_pattern_positions(config: Any) -> None:
    """Raise ConfigurationError for global tokens of a pattern beyond the rows of the learned position table."""
    if config.position_embedding_type != "learned":
        return
    for part, field in ((ENCODER, "max_position_embeddings"), (DECODER, "max_target_position_embeddings")):
        num_positions = getattr(config, field, config.max_position_embeddings)
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            _check_global_positions(pattern, num_positions, f"0 to {num_positions - 1} ({field}={num_positions})")


def _check_global_positions(pattern: Pattern, num_positions: int, allowed: str) -> None:
    """Raise ConfigurationError for a global token outside of `num_positions`."""
    for named in pattern.global_positions():
        if not named.is_within(num_positions):
            raise ConfigurationError(
                f"attention_pattern has the global position {named.position}{named.unit}, but inputs have positions "
                f"{allowed}: no token is there. Leave it out, or make the table longer."
            )


def check_short_inputs(config: Any) -> None:
    """Raise ConfigurationError for transformers' evaluation of BigBird in a causal model.

    Which blocks block 0 replaces depends on the last block, and full attention on the length: text after a token would
    change it.
    """
    if not config.is_causal:
        return
    for name, allowed in {"random_blocks_in_eval": "fixed", "full_attention_up_to": None}.items():
        value = getattr(config, name)
        if value != allowed:
            raise ConfigurationError(
                f"{name}={shown(value)} depends on the length of the text, and is_causal=True: tokens must not depend "
                f"on what follows. It must be {shown(allowed)} here: leave it out, or build a bidirectional model."
            )


def check_attention(config: Any) -> None:
    """Raise ConfigurationError for global tokens, positions and lengths that exclude each other."""
    check_short_inputs(config)
    has_table = config.position_embedding_type == "learned"
    check_rule(config.global_tokens, config.vocab_size, config.max_position_embeddings if has_table else None)
    is_relative = config.position_embedding_type == "relative"
    if is_relative and (config.global_tokens is not None or config.global_projections):
        raise ConfigurationError(f"{NOT_RELATIVE} Set global_tokens=None and global_projections=False, or use 'rope'.")
