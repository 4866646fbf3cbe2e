"""The models and the text `analyze spans` looks at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_efficient_attn.analysis.model_text import check_tokens, decoded, read_bytes, tokenizer_of
from hf_efficient_attn.analysis.signal_sources import load_model
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.spans.module import known_spans

# what a picture can show of characters that leave no ink; half a character of UTF-8 is decoded as U+FFFD
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "→", "\ufffd": "·"})
TEXT_NAME = "the text that comes with the command"
TEXT = """\
The lighthouse keeper seldom overlooked a ship. Every afternoon, before the sun went down, she walked up the narrow \
staircase, wiped the windows with an old newspaper and wrote the weather into her notebook: wind from the northwest, \
twelve knots, a little rain. Sometimes nothing happened for weeks. Then, without any forewarning, a thunderstorm came \
across the water, and everybody in the fishing village below understood again why the lighthouse stood there.

"Somebody has to stay awake," she used to say, "and nobody is better at it than I am." Her grandfather had said \
nearly the same sentence, word for word, fifty years before, and he had meant it just as seriously. In his notebooks, \
which she kept in a cupboard downstairs, the handwriting was small and upright. On the 14th of March he had written: \
"Wind from the northwest, thirty knots. Two fishing boats overdue. Lit the lamp at half past three." On the 15th: \
"Both boats came home. Nevertheless I did not sleep."

Nowadays a computer switches the lamp on and off, and the keeper's daughter, who is a programmer, can look after it \
from her workplace in the city. But the old woman does not trust what she cannot overlook from her own window. So she \
still climbs the staircase every afternoon, opens the notebook and writes down the weather; and whenever the \
northwest wind is stronger than thirty knots, she stays awake until all of the boats have come home.
"""


@dataclass(frozen=True)
class TextTokens:
    """A text as a model reads it: the ids of its tokens, and what a picture shows for each."""

    ids: tuple[int, ...]
    symbols: tuple[str, ...]


def load_span_model(source: str, seed: int) -> Any:
    """Return the backbone of a model with spans, in float32 and evaluation mode.

    Args:
        source: a checkpoint folder, a Hub id, or a config.json, whose weights are then drawn from `seed`.

    Raises:
        InputError: none of these, or a model without spans.
        CheckpointError: a damaged one.
    """
    model = load_model(source, seed).eval()
    try:
        known_spans(model)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return model


def read_text(path: Path | None) -> bytes:
    """Return the bytes of a text file; without one, those of a short English text.

    Raises:
        InputError: no such file.
    """
    return TEXT.encode() if path is None else read_bytes(path)


def tokenize(source: str, model: Any, text: bytes) -> TextTokens:
    """Return the tokens of a text, by the tokenizer beside the model or, for 256 tokens and no tokenizer, its bytes.

    Raises:
        InputError: a text that is not in UTF-8, no tokenizer where one is needed, one that does not fit the model, or
            fewer than 2 tokens.
    """
    vocab_size = model.config.vocab_size
    tokenizer = tokenizer_of(source, vocab_size)
    if tokenizer is None:
        ids = list(text)
        symbols = [chr(byte) if byte < 128 else "\ufffd" for byte in ids]
    else:
        ids = tokenizer(decoded(text), add_special_tokens=False, verbose=False)["input_ids"]
        symbols = [str(tokenizer.decode([token])) for token in ids]
    check_tokens(source, ids, vocab_size)
    return TextTokens(tuple(ids), tuple(symbol.translate(VISIBLE) for symbol in symbols))
