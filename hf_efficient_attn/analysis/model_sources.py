"""Models and texts in the forms that commands accept: checkpoints, configs, named blocks, and the tokens of a text."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_efficient_attn.convert.hub import find_on_hub
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.hub.saved_config import load_config, readable
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES, HEAD_GAINS
from hf_efficient_attn.models.spans.module import known_spans

NUM_BYTES = 256
# config files of adapters and of models
CONFIGS = ("adapter_config.json", "config.json")


def find_saved(source: str) -> str:
    """Return the folder or Hub id of a saved model for transformers, without the retries of its requests to the Hub.

    Raises:
        CheckpointError: not a folder, and the Hub has no such model or cannot be reached.
    """
    return find_on_hub(source, CONFIGS)


def read_bytes(path: Path) -> bytes:
    """Return the content of a text file.

    Raises:
        InputError: there is no such file.
    """
    if not path.is_file():
        raise InputError(f"--text {path}: no such file.")
    return path.read_bytes()


def decoded(content: bytes) -> str:
    """Return the text of a file, for a tokenizer.

    Raises:
        InputError: it is not in UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"The text is not in UTF-8: byte {error.start:,} is {content[error.start]:#04x}. Save it in UTF-8; only "
            f"models whose tokens are the {NUM_BYTES} bytes accept any file."
        ) from error


def tokenizer_of(source: str, vocab_size: int) -> Any:
    """Return the tokenizer saved with a model; None: there is none, and the model's 256 tokens can be bytes.

    Raises:
        InputError: there is no tokenizer, and the model's tokens cannot be bytes.
    """
    saved = find_saved(source)
    try:
        return AutoTokenizer.from_pretrained(saved)
    except (OSError, ValueError) as error:
        if vocab_size == NUM_BYTES:
            return None
        raise InputError(
            f"{source} has no tokenizer, and its {vocab_size:,} tokens cannot be the {NUM_BYTES} bytes. Save its "
            "tokenizer with the model."
        ) from error


def check_tokens(source: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError if a text has fewer than 2 tokens, or a token that the model does not have."""
    if len(ids) < 2:
        raise InputError(f"The text has {len(ids)} tokens; attention between tokens needs at least 2 tokens.")
    if max(ids) >= vocab_size:
        raise InputError(
            f"The tokenizer of {source} gives token {max(ids)}, but the model has {vocab_size:,} tokens. Save the "
            "tokenizer that the model was trained with."
        )


# Learned positions start as noise, so that tokens start unrelated (cosine 0); sinusoids start at a cosine of 0.5.
DEFAULT_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "position_embedding_type": "learned",
}
# the gains that SAS trains in addition to α, β and γ
OTHER_GAINS = [name for name in BLOCK_STYLES["sas"].trainable if name not in HEAD_GAINS]


@dataclass(frozen=True)
class NamedBlock:
    """A block for `--model`: its name in a legend, and the config fields that define it."""

    title: str
    fields: dict[str, Any]


NAMED_BLOCKS = {
    "pre_ln": NamedBlock("Pre-LN (skips, softmax)", {"block": "pre_ln"}),
    "parallel": NamedBlock("parallel (one skip, softmax)", {"block": "parallel"}),
    "v_skipinit": NamedBlock("V-SkipInit (no attention skip, shaped)", {"block": "v_skipinit"}),
    "sas": NamedBlock("SAS (no attention skip, shaped)", {"block": "sas"}),
    "sas_p": NamedBlock("SAS-P (no skip, shaped)", {"block": "sas_p"}),
    "sas_p_no_norm": NamedBlock("SAS-P without norms (no skip, shaped)", {"block": "sas_p_no_norm"}),
    # SAS with α = γ = 0: only shaping is removed. W^Q then starts as in plain attention, at N(0, 0.02).
    "sas_unshaped": NamedBlock(
        "SAS unshaped (no attention skip, softmax)",
        {"block": "sas", "identity_gain": 0.0, "centering_gain": 0.0, "trainable_gains": OTHER_GAINS},
    ),
    # equation 4 of the paper: α·I + β·A with α = 1, β = 0 at the start
    "value_skipinit": NamedBlock(
        "SAS with value-SkipInit (no attention skip, αI + βA)",
        {
            "block": "sas",
            "identity_gain": 1.0,
            "softmax_gain": 0.0,
            "centering_gain": 0.0,
            "trainable_gains": ["identity_gain", "softmax_gain", *OTHER_GAINS],
        },
    ),
}


def label(source: str) -> str:
    """Return the name of `source` in a legend: the title of a named block, or the end of a path or Hub id."""
    if source in NAMED_BLOCKS:
        return NAMED_BLOCKS[source].title
    return "/".join(Path(source).parts[-2:])


def load_model(source: str, seed: int) -> Any:
    """Return the backbone of `source` in float32; weights that are not loaded are drawn from `seed`.

    Args:
        source: a name in `NAMED_BLOCKS`, a config.json, a checkpoint folder or a Hub id.

    Raises:
        InputError: a path without a saved model, or a model that transformers cannot load.
        CheckpointError: not a folder, and the Hub has no such model or cannot be reached.
    """
    if source in NAMED_BLOCKS:
        return _at_start(SimplifiedTransformerConfig(**DEFAULT_SHAPE, **NAMED_BLOCKS[source].fields), seed)
    path = Path(source)
    _check_path(source, path)
    if path.suffix == ".json":
        return _at_start(load_config(source), seed)
    verbosity = logging.get_verbosity()
    # hide the warning about the weights of the head, which is left out on purpose
    logging.set_verbosity_error()
    try:
        with readable(source):
            return AutoModel.from_pretrained(find_saved(source), dtype=torch.float32)
    finally:
        logging.set_verbosity(verbosity)


def _check_path(source: str, path: Path) -> None:
    """Raise InputError for a path at which there is no saved model."""
    is_local = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if is_local and not path.exists():
        raise InputError(f"{source}: no such file or folder.")
    if path.is_file() and path.suffix != ".json":
        raise InputError(f"{source} is a file. Give the folder of a saved model, or a config.json.")
    if path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        raise InputError(f"The folder {source} has no config.json. Give the folder of a saved model.")


def _at_start(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(config, dtype=torch.float32)


def reads_text(source: str) -> bool:
    """Return whether a source of `load_model` has trained weights, which are measured on text."""
    return source not in NAMED_BLOCKS and not source.endswith(".json")


def load_tokens(
    source: str, model: Any, tokens: int, batch_size: int, seed: int, text: Path | None, random_tokens: bool
) -> torch.Tensor:
    """Return the token ids to send through `model`: text for a checkpoint, else random ids. Shape [batch_size, tokens].

    The text is cut into `batch_size` pieces of equal length, and the first `tokens` tokens of each piece are used.

    Raises:
        InputError: a checkpoint without a tokenizer, or a text file that does not exist, is not in UTF-8 or is too
            short.
    """
    if random_tokens or not reads_text(source):
        generator = torch.Generator("cpu").manual_seed(seed)
        vocab_size = model.config.get_text_config().vocab_size
        return torch.randint(vocab_size, (batch_size, tokens), generator=generator)
    saved = find_saved(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(saved)
    except (OSError, ValueError) as error:
        raise InputError(f"{source} has no tokenizer. Save one with the model, or pass --random-tokens.") from error
    path = Path(argparse.__file__) if text is None else text
    content = decoded(read_bytes(path))
    size = len(content) // batch_size
    pieces = [content[i * size : (i + 1) * size] for i in range(batch_size)]
    rows = tokenizer(pieces, truncation=True, max_length=tokens)["input_ids"]
    shortest = min(len(row) for row in rows)
    if shortest < tokens:
        raise InputError(
            f"{path.name} is too short for {batch_size} sequences of {tokens} tokens: one of them would have only "
            f"{shortest}. Pass a longer --text, or fewer --tokens or a smaller --batch-size."
        )
    return torch.tensor(rows)


MAX_TOKENS = 16384
# model_max_length of a tokenizer without a limit is larger than this
NO_LIMIT = 10**9
PREFIXED = ("roberta", "camembert", "xlm-roberta", "longformer")


@dataclass(frozen=True)
class ShownTokens:
    """The tokens of a text, and what the page shows for each.

    Attributes:
        ids: the ids of the tokens, up to the longest input.
        texts: the text of each token; if one character has several tokens, the first shows it and the others a dot.
        special: the indices of special tokens, such as [CLS].
        num_left_out: the number of tokens beyond the longest input.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    special: tuple[int, ...]
    num_left_out: int


def read_tokens(source: str, config: Any, content: bytes, max_tokens: int | None) -> ShownTokens:
    """Return the tokens of a text, from the model's tokenizer or, for 256 tokens and no tokenizer, its bytes.

    Args:
        max_tokens: the maximum number of tokens; None: 16,384. Positions and tokenizer of the model may lower it.

    Raises:
        InputError: a text that is not in UTF-8, a missing tokenizer, a tokenizer that does not fit the model, or fewer
            than 2 tokens.
    """
    tokenizer = tokenizer_of(source, config.vocab_size)
    longest = _longest(config, tokenizer, max_tokens)
    if longest < 2:
        raise InputError(f"--tokens {longest}: attention between tokens needs at least 2 tokens.")
    special: list[int] = []
    if tokenizer is None:
        ids, texts, num_tokens = list(content[:longest]), _byte_texts(content)[:longest], len(content)
    else:
        ids, special, texts, num_tokens = _tokenized(tokenizer, decoded(content), longest)
    check_tokens(source, ids, config.vocab_size)
    return ShownTokens(tuple(ids), tuple(texts), tuple(special), num_tokens - len(ids))


def _tokenized(tokenizer: Any, text: str, longest: int) -> tuple[list[int], list[int], list[str], int]:
    """Return token ids, indices of special tokens, the text of each token, and the number of tokens without a limit."""
    options = {"return_special_tokens_mask": True, "return_offsets_mapping": tokenizer.is_fast}
    encoded = tokenizer(text, truncation=True, max_length=longest, **options)
    ids, special = encoded["input_ids"], [i for i, is_it in enumerate(encoded["special_tokens_mask"]) if is_it]
    texts = [str(tokenizer.decode([token])) for token in ids]
    if tokenizer.is_fast:
        texts = _texts_at(text, encoded["offset_mapping"], texts, set(special))
    return ids, special, texts, len(tokenizer(text, verbose=False)["input_ids"])


def _longest(config: Any, tokenizer: Any, max_tokens: int | None) -> int:
    """Return the longest input in tokens; RoBERTa's first two positions are not used for tokens."""
    limits = [MAX_TOKENS if max_tokens is None else max_tokens]
    positions = getattr(config, "max_position_embeddings", None)
    if positions:
        limits.append(positions - 2 if config.model_type in PREFIXED else positions)
    if tokenizer is not None and tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits)


def _byte_texts(content: bytes) -> list[str]:
    r"""Return a text for each byte: the character that it begins, a dot for its further bytes, or the byte in hex.

    >>> _byte_texts(b"a\n\xc3\xa9\xff\x00")
    ['a', '\n', 'é', '·', '‹FF›', '‹00›']
    """
    texts = []
    for letter in content.decode(errors="surrogateescape"):
        is_alone = "\udc80" <= letter <= "\udcff"
        if is_alone or (ord(letter) < 32 and letter not in "\n\t\r"):
            texts.append(f"‹{ord(letter) & 0xFF:02X}›")
        else:
            texts += [letter, *"·" * (len(letter.encode()) - 1)]
    return texts


def _texts_at(text: str, offsets: list[tuple[int, int]], decoded: list[str], special: set[int]) -> list[str]:
    """Return the part of the text for each token, with the text before it that has no token, such as spaces.

    If several tokens are the bytes of one character, the first shows the character and the others a dot.

    >>> _texts_at("a é", [(0, 0), (0, 1), (2, 3), (2, 3)], ["[CLS]", "a", "?", "?"], {0})
    ['[CLS]', 'a', ' é', '·']
    """
    texts, end = [], 0
    for place, (_, stop) in enumerate(offsets):
        if place in special:
            texts.append(decoded[place])
            continue
        texts.append(text[end:stop] if stop > end else "·")
        end = max(end, stop)
    return texts


# visible signs for white space in a picture; a part of a UTF-8 character is decoded as U+FFFD
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
    """The tokens of a text: their ids, and what a picture shows for each."""

    ids: tuple[int, ...]
    symbols: tuple[str, ...]


def load_span_model(source: str, seed: int) -> Any:
    """Return the backbone of a model with spans, in float32 and evaluation mode.

    Args:
        source: a checkpoint folder, a Hub id, or a config.json, whose weights are then drawn from `seed`.

    Raises:
        InputError: none of these, or a model without spans.
        CheckpointError: a damaged checkpoint, or a Hub id that cannot be found.
    """
    model = load_model(source, seed).eval()
    try:
        known_spans(model)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return model


def read_text(path: Path | None) -> bytes:
    """Return the bytes of a text file; None: the bytes of a short English text.

    Raises:
        InputError: no such file.
    """
    return TEXT.encode() if path is None else read_bytes(path)


def tokenize(source: str, model: Any, text: bytes) -> TextTokens:
    """Return the tokens of a text, from the model's tokenizer or, for 256 tokens and no tokenizer, its bytes.

    Raises:
        InputError: a text that is not in UTF-8, a missing tokenizer, a tokenizer that does not fit the model, or fewer
            than 2 tokens.
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
