"""BigBird's blocks, as the fields of transformers' configs and as our pattern."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.big_bird import PREFIX_LENGTHS, bigbird


def bigbird_fields(config: Any, parity: bool) -> dict[str, Any]:
    """Return our fields: the paper's function, or with `parity` that of transformers."""
    if config.attention_type == "original_full":
        return {}
    block, count = config.block_size, config.num_random_blocks
    exact = {"random_blocks_in_eval": "transformers", "full_attention_up_to": (5 + 2 * count) * block}
    return {
        "attention_pattern": bigbird(block, count, seed=0, plan="transformers" if parity else "authors"),
        "attention_dropout": 0.0,
        **(exact if parity else {}),
    }


def bigbird_numbers(config: Any, model_type: str) -> dict[str, Any]:
    """Return their fields.

    Raises:
        ConfigurationError: another pattern than that of BigBird, with the seeds of the published code, in all layers.
    """
    if config.attention_pattern is None:
        return {"attention_type": "original_full"}
    patterns = config_patterns(config.attention_pattern, config, ENCODER) or (None,)
    for pattern in set(patterns) if len(set(patterns)) == 1 else ():
        sizes = [member.to_dict() for member in pattern.members()] if pattern is not None else []
        drawn = next((size for size in sizes if size["kind"] == "bigbird_blocks"), None)
        if drawn is not None:
            block, count = drawn["block_tokens"], drawn["num_blocks"]
            if pattern in [bigbird(block, count, 0, plan) for plan in PREFIX_LENGTHS]:
                return {"attention_type": "block_sparse", "block_size": block, "num_random_blocks": count}
    raise ConfigurationError(
        f"{model_type} knows one pattern, the same in all layers: patterns.bigbird(block_tokens, num_random_blocks, "
        f"seed=0, plan='authors' or 'transformers'). The config has {shown(config.attention_pattern)}."
    )


def bigbird_deviations(model_type: str) -> dict[str, str]:
    """Return the fields of our pattern in which a model type of theirs differs, and how."""
    return {
        "attention_pattern": f"{model_type} draws other random blocks at 2,048 tokens",
        "random_blocks_in_eval": f"{model_type} evaluates with copies of block 0 in the place of random blocks",
        "full_attention_up_to": f"{model_type} reads short inputs by full attention",
    }
