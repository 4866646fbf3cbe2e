"""Every family with its models under contract, for all tests: a new family joins by its entry in `OURS`.

The contracts take all cases. Where one model of a family is enough, a test asks for what writes or reads texts, or for
the cases of its column; see `family.py`.
"""

from typing import Any

from bp_cases import BP
from bp_seq2seq_cases import BP_SEQ2SEQ
from compressed_cases import COMPRESSED
from content_cases import REFORMER, ROUTING
from etc_cases import ETC
from seq2seq_cases import SEQ2SEQ
from simplified_cases import SIMPLIFIED
from span_cases import SPANS
from sparse_cases import SPARSE
from sparsified_cases import SPARSIFIED
from star_cases import STAR

OURS = (SIMPLIFIED, SPARSE, SEQ2SEQ, SPANS, REFORMER, ROUTING, STAR, ETC, BP, BP_SEQ2SEQ, COMPRESSED)
FAMILIES = (*OURS, SPARSIFIED)

# by family, what writes a text and what reads one at once; an encoder-decoder does both
WRITERS = {family.name: family.writer for family in FAMILIES if family.writer is not None}
READERS = {family.name: family.reader for family in FAMILIES if family.reader is not None}
ENCODERS = [family.name for family in FAMILIES if family.writer is None]
DECODERS = [family.name for family in FAMILIES if family.writer is not None and not family.is_encoder_decoder]
ENCODER_DECODERS = [family.name for family in FAMILIES if family.is_encoder_decoder]
# the models of one stack, which have contracts of their own, and encoder-decoders
CASES = [case for family in OURS if not family.is_encoder_decoder for case in family.cases]
SEQ2SEQ_CASES = [case for family in OURS if family.is_encoder_decoder for case in family.cases]
BY_NAME = {case.name: case for case in (*CASES, *SEQ2SEQ_CASES)}


def one_each() -> dict[str, Any]:
    """Return the first case of each family of ours and direction, which together have all of its heads, by name."""
    found: dict[Any, Any] = {}
    for case in BY_NAME.values():
        found.setdefault((case.config_class, case.main_head), case)
    return {case.name: case for case in found.values()}
