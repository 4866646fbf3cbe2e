"""The stars under contract; a family of `families.py`."""

from family import Family
from models_cases import Case

import hf_efficient_attn as hea

# without the dropouts of the preset; its heads together are not as wide as the model
FASTNLP = {"head_dim": 6, "embedding_dropout": 0.0, "classifier_dropout": 0.0}
STAR = Family(
    "star_transformer",
    (
        Case("star-paper", hea.StarTransformerConfig, (("relay_init", "learned"),), shows_a_route=True),
        Case("star-fastnlp", hea.StarTransformerConfig, tuple(FASTNLP.items()), preset="fastnlp"),
    ),
    refuses={"halo": "star_transformer need whole sequences", "prefix": "Prefix tuning cannot give it keys"},
)
