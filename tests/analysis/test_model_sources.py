"""Text files that commands are given."""

import pytest

from hf_efficient_attn.analysis.model_sources import decoded
from hf_efficient_attn.errors import InputError


def test_text_in_another_encoding_is_refused_by_its_first_wrong_byte() -> None:
    assert decoded("née".encode()) == "née"
    with pytest.raises(InputError, match="not in UTF-8: byte 1 is 0xe9"):
        decoded("née".encode("latin-1"))
