"""Config fields of linear attention and of priors, and their checks."""

import math
from dataclasses import dataclass, fields
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_least

FEATURE_MAPS = ("elu", "positive_random", "constant")


@dataclass(init=False, repr=False, eq=False)
class FeatureFields:
    """Mixin: the features of linear attention; each family's config documents the fields."""

    feature_map: str = "elu"
    num_features: int | None = None
    feature_seed: int = 0
    feature_redraw_steps: int | None = None
    normalizer_epsilon: float | int = 1e-6
    chunk_tokens: int = 128

    @property
    def features_of_head(self) -> int:
        """The number F of features of a head of linear attention."""
        head_dim: int = self.head_dim  # type: ignore[attr-defined]
        if self.feature_map != "positive_random":
            return head_dim if self.feature_map == "elu" else 1
        return self.num_features or max(1, int(head_dim * math.log(head_dim)))

    @property
    def state_of_head(self) -> int:
        """Number of elements in the state of a causal head: S, z and, for random features, the exponent."""
        head_dim: int = self.head_dim  # type: ignore[attr-defined]
        return self.features_of_head * (head_dim + 1) + int(self.feature_map == "positive_random")


@dataclass(init=False, repr=False, eq=False)
class PriorFields:
    """Mixin: a prior by distance; each family's config documents the fields."""

    prior_width_tokens: float | int = 16
    prior_is_trained: bool = True


FEATURE_FIELDS = tuple(each.name for each in fields(FeatureFields))
PRIOR_FIELDS = tuple(each.name for each in fields(PriorFields))


def check_features(config: Any) -> None:
    """Raise ConfigurationError for values that linear attention cannot have."""
    epsilon = config.normalizer_epsilon
    if config.feature_map == "positive_random" and epsilon != type(config).normalizer_epsilon:
        raise ConfigurationError(
            f"normalizer_epsilon={epsilon}, but feature_map='positive_random' adds nothing to its sums. Leave "
            "normalizer_epsilon out, or use feature_map='elu' or 'constant'."
        )
    if config.num_features is not None and config.feature_map != "positive_random":
        raise ConfigurationError(
            f"num_features={config.num_features}, but with feature_map={shown(config.feature_map)} the number of "
            "features is fixed. Leave num_features out, or use feature_map='positive_random'."
        )
    check_least(config, num_features=1, feature_redraw_steps=1)
    if config.feature_redraw_steps is not None and config.feature_map != "positive_random":
        raise ConfigurationError(
            f"feature_redraw_steps={config.feature_redraw_steps}, but feature_map={shown(config.feature_map)} has no "
            "random features. Leave feature_redraw_steps out, or use feature_map='positive_random'."
        )
