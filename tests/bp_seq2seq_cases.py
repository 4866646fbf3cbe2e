"""The BP-Transformers that translate under contract; a family of `families.py`."""

from family import Family
from seq2seq_cases import Seq2SeqCase

import hf_efficient_attn as hea

# labels of one level, and of several
TREE = {"num_nodes": 2, "clip_distance": 1, "activation_dropout": 0.0, "attention_dropout": 0.0}
POSITIONS = {**TREE, "num_nodes": 1, "position_embedding_type": "learned", "lm_head_bias": True}
BP_SEQ2SEQ = Family(
    "bp_seq2seq",
    (
        Seq2SeqCase("bp-seq2seq", hea.BPSeq2SeqConfig, "wmt14", tuple(TREE.items()), shows_a_route=True),
        Seq2SeqCase(
            "bp-seq2seq-positions",
            hea.BPSeq2SeqConfig,
            "iwslt",
            tuple(POSITIONS.items()),
            is_traced=False,
        ),
    ),
    refuses={"halo": "bp_seq2seq need whole sequences", "prefix": "half of them for spans"},
)
