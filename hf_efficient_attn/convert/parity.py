"""Inputs for which a converted model differs from its source even with `parity`, and why."""

# "there" is transformers
PADDING_BEFORE = "padding before or between tokens, as positions count tokens here, places there"
PADDING_BETWEEN = "padding between tokens, as rotary positions count tokens here, places there"
PAD_IDS = "pad ids that no attention_mask hides, as each has a position here, and all have one there"
SHORTER = "inputs shorter than the longest of a batch, as their own last block is global here, one of padding there"
AFTER_SHORT = "inputs after one short enough for full attention, as all that follow are then read by it there"
POOLED_PADDING = "sequences that begin with padding, as the first token is classified there, the first real one here"
TOKEN_TYPES = "question answering without token_type_ids, as they are made from the first separator there"

PADDED = "padding anywhere, which landmarks, convolutions and positions read there"
OTHER_LENGTH = "texts of landmarks of another length than segment_means_seq_len, of which rows are mixed there"
HASHED = "texts longer than a chunk, whose rotations are drawn anew at every call there, and are fixed here"
WRAPPED = "texts of encoders behind which a whole chunk of padding is added there, which the first chunk then reads"

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "bart": (PADDING_BEFORE,),
    "bert": (PADDING_BEFORE,),
    "big_bird": (PADDING_BEFORE, SHORTER, AFTER_SHORT, TOKEN_TYPES),
    "bigbird_pegasus": (PADDING_BEFORE, SHORTER, AFTER_SHORT),
    "led": (PADDING_BEFORE,),
    "longformer": (PAD_IDS, POOLED_PADDING),
    "marian": (PADDING_BEFORE,),
    "modernbert": (PADDING_BETWEEN, POOLED_PADDING),
    "nystromformer": (PADDED, OTHER_LENGTH),
    "pegasus": (PADDING_BEFORE,),
    "reformer": (HASHED, WRAPPED, PADDING_BEFORE, POOLED_PADDING),
    "roberta": (PAD_IDS, POOLED_PADDING),
    "xlm-roberta": (PAD_IDS, POOLED_PADDING),
}


def note_exceptions(source_type: str, target_type: str) -> str:
    """Return a sentence on inputs for which a model of one type and what it became differ; none: the empty text."""
    sides = EXCEPTIONS.get(source_type, ()), EXCEPTIONS.get(target_type, ())
    # what both models of transformers do, only ours does otherwise
    exceptions = [each for side in sides for each in side if not all(each in other for other in sides)]
    return f"Even with parity, outputs differ from the source's for: {'; '.join(exceptions)}. " if exceptions else ""
