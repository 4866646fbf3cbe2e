"""Show rank collapse, norms, attention entropy and gains of a model, layer by layer.

    hf-efficient-attn analyze signal --model pre_ln sas path/to/model --tokens 256

In an untrained model, the vectors of different tokens should stay different from layer to layer (in rank collapse, they
become alike), and their norms should neither vanish nor explode. Skip connections ensure this. Without them, plain
softmax attention averages the vectors of all tokens, so they become alike. Shaped attention α·I + β·A − γ·C keeps them
different; I is the identity, A holds the attention weights, and C averages the keys that a query may attend to.

Cosines lie between -1 and 1, entropies are in nats. signal.json, which --json prints, holds {"settings", "models"};
each model has a list of its layers.

Source: He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906), sections 2 and 4.1, after Noci et al.
(arXiv:2306.17759). The papers have no curve to compare with. The measure of rank collapse here is the mean cosine
between the vectors of a sequence.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.analysis.model_sources import NAMED_BLOCKS, label, load_model, load_tokens, reads_text
from hf_efficient_attn.analysis.signal_report import (
    PIXELS_PER_INCH,
    GainReading,
    LayerSignal,
    SignalReport,
    signal_figure,
)
from hf_efficient_attn.errors import CheckpointError, InputError
from hf_efficient_attn.integration.guard import has_pattern
from hf_efficient_attn.integration.layer_patterns import NAME as EFFICIENT
from hf_efficient_attn.models.simplified_transformer.gains import GAIN_SYMBOLS
from hf_efficient_attn.pictures import check_destination, check_picture, save_figure

# module that scales a part of W = a·W_init + b·ΔW -> the config field of its gain
MATRIX_GAINS = {
    "v_proj.skip_gain": "value_skip_gain",
    "v_proj.update_gain": "value_gain",
    "o_proj.skip_gain": "projection_skip_gain",
    "o_proj.update_gain": "projection_gain",
}


def analyze_signal(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> SignalReport:
    """Return cosine, norm, attention entropy and gains after the embedding and after every block.

    The model may be any encoder or causal model of transformers; gains are found in models that have them. It runs in
    evaluation mode with eager attention, or with its pattern if it is sparsified; its mode and attention are restored
    afterwards. The last layer is measured before the final norm if the blocks of the model can be found, otherwise
    after it.

    Args:
        model: a transformers model, with or without a head.
        input_ids: [B, T], at least 1 sequence of at least 2 tokens.
        attention_mask: [B, T], 1 = real token; padding is left out of every mean. None: all tokens are real.

    Raises:
        InputError: shapes that do not fit, fewer than 2 real tokens in every sequence, an encoder-decoder, or a model
            that does not return its hidden states.
    """
    _check_inputs(input_ids, attention_mask)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder; only a single stack of layers can be measured. Pass its "
            "encoder: analyze_signal(model.get_encoder(), input_ids)."
        )
    device = next(model.parameters()).device
    mask = None if attention_mask is None else attention_mask.to(device)
    states, attentions = _observe(model, input_ids.to(device), mask)
    real = torch.ones(states[0].shape[:2], device=device).bool() if mask is None else mask.bool()
    gains = read_gains(model)
    layers = [LayerSignal(token_cosine(states[0], real), rms(states[0], real))]
    for block, state in enumerate(states[1:]):
        layer = LayerSignal(token_cosine(state, real), rms(state, real), gains=gains.get(block, ()))
        if len(attentions) == len(states) - 1:
            nats, uniform = attention_entropy(attentions[block], real)
            relative = [value / uniform if uniform else 1.0 for value in nats]
            layer = replace(layer, entropy_nats=tuple(nats), entropy_relative=tuple(relative), uniform_nats=uniform)
        layers.append(layer)
    return SignalReport(type(model).__name__, len(input_ids), int(real.sum()), tuple(layers))


def token_cosine(hidden: torch.Tensor, real: torch.Tensor) -> float:
    """Return the mean cosine between two different real tokens of a sequence, averaged over sequences.

    It is computed in float64 from Σ_{i≠j} u_i·u_j = |Σ u_i|² − Σ |u_i|² over unit vectors, without a [T, T] matrix.
    Sequences of fewer than two real tokens are left out. Shapes: hidden [B, T, hidden_size], real [B, T] (bool).

    >>> token_cosine(torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]]), torch.tensor([[True, True, False]]))
    0.0
    """
    unit = torch.where(real.unsqueeze(-1), nn.functional.normalize(hidden.double(), dim=-1), 0)
    counts = real.sum(1).double()
    pairs = counts * (counts - 1)
    products = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    return float((products[pairs > 0] / pairs[pairs > 0]).mean())


def rms(hidden: torch.Tensor, real: torch.Tensor) -> float:
    """Return the root mean square of all numbers of real tokens. Shapes as in `token_cosine`."""
    return float(hidden[real].double().square().mean().sqrt())


def attention_entropy(weights: torch.Tensor, real: torch.Tensor) -> tuple[list[float], float]:
    """Return the mean entropy of real queries per head, and the entropy of uniform attention to the same keys, in nats.

    A key counts as allowed if some head gives it a weight above 0. Shapes: weights [B, H, T, K], real [B, T] (bool).
    """
    entropy = torch.special.entr(weights.double()).sum(-1).transpose(1, 2)
    allowed = (weights > 0).any(1).sum(-1).clamp(min=1)
    return entropy[real].mean(0).tolist(), float(allowed[real].double().log().mean())


def read_gains(model: nn.Module) -> dict[int, tuple[GainReading, ...]]:
    """Return the gains of every block, by the block's number from 0.

    A gain is any module inside a numbered block that has a number `value` and a `gain` that is a parameter or None.
    """
    found: dict[int, list[GainReading]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        block = next((int(part) for part in parts if part.isdecimal()), None)
        value, gain = getattr(module, "value", None), getattr(module, "gain", False)
        if block is None or not isinstance(value, int | float) or not (gain is None or torch.is_tensor(gain)):
            continue
        name = MATRIX_GAINS.get(".".join(parts[-2:]), parts[-1])
        values = (float(value),) if gain is None else tuple(gain.detach().float().tolist())
        reading = GainReading(name, GAIN_SYMBOLS.get(name, name), values, float(value), gain is not None)
        found.setdefault(block, []).append(reading)
    return {block: tuple(gains) for block, gains in found.items()}


def _check_inputs(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] < 1 or input_ids.shape[1] < 2:
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)}; a cosine between tokens needs [batch, tokens] with at "
            "least 1 sequence of at least 2 tokens."
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but input_ids has shape "
            f"{tuple(input_ids.shape)}. Pass one number per token, 1 for real tokens."
        )
    if int(attention_mask.bool().sum(1).max()) < 2:
        raise InputError("attention_mask leaves no sequence with at least 2 real tokens; there is nothing to compare.")


def _observe(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    last: list[tuple[torch.Tensor, torch.Tensor]] = []  # input and output of the last block

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if args:
            last.append((args[0], output[0] if isinstance(output, tuple) else output))

    with _evaluation(model), torch.no_grad():
        block = _last_block(model)
        hook = None if block is None else block.register_forward_hook(record)
        try:
            outputs = model(
                input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, output_attentions=True
            )
        finally:
            if hook is not None:
                hook.remove()
    states = list(outputs.get("hidden_states") or ())
    if len(states) < 2:
        raise InputError(
            f"{type(model).__name__} returned no hidden states, so there is nothing to measure. Use a transformers "
            "model whose forward takes output_hidden_states=True."
        )
    if last and torch.equal(last[-1][0], states[-2]):
        states[-1] = last[-1][1]
    return states, tuple(outputs.get("attentions") or ())


def _last_block(model: Any) -> nn.Module | None:
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    return lists[0][-1] if lists else None


@contextmanager
def _evaluation(model: Any) -> Iterator[None]:
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    # both implementations return weights, but a sparsified model of transformers uses its pattern only with EFFICIENT
    is_sparsified = has_pattern(model.config) and not getattr(model, "follows_patterns", False)
    model.set_attn_implementation(EFFICIENT if is_sparsified else "eager")
    try:
        yield
    finally:
        model.train(was_training)
        if implementation is not None:
            model.set_attn_implementation(implementation)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-efficient-attn analyze signal`."""
    names = "; ".join(f"{name}: {block.title}" for name, block in NAMED_BLOCKS.items())
    parser.add_argument(
        "--model",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="models: a folder or a name on the Hub (measured on --text); a config.json (random weights and tokens); "
        f"or a block, for an untrained decoder of 12 layers and hidden size 192 (random tokens): {names}",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for saved models, in UTF-8 (default: the source code of Python's argparse module)",
    )
    parser.add_argument("--random-tokens", action="store_true", help="use random tokens for saved models as well")
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="tokens per sequence, at least 2 (default 128)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="number of sequences (default 8)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of random weights and tokens (default 0)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/signal"),
        metavar="FOLDER",
        help="folder to write signal.json and signal.png to (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print signal.json instead of tables")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="another file for the picture (.png, .svg or .pdf)"
    )


def main(args: argparse.Namespace) -> None:
    """Analyze every model of the command line, print the tables, write signal.json and the picture."""
    if args.tokens < 2 or args.batch_size < 1:
        raise InputError(
            f"--tokens {args.tokens} --batch-size {args.batch_size}: at least 2 tokens and 1 sequence are needed."
        )
    if args.text is not None and (args.random_tokens or not any(map(reads_text, args.model))):
        raise InputError(
            f"--text {args.text} is only used by saved models, and only without --random-tokens. Leave it out."
        )
    picture = args.picture or args.output / "signal.png"
    # fail before measuring if the picture cannot be drawn
    check_picture(picture)
    check_destination(args.output / "signal.json")
    reports = []
    for source in args.model:
        model = _load(source, args.seed)
        text = None if args.random_tokens else args.text
        input_ids = load_tokens(source, model, args.tokens, args.batch_size, args.seed, text, args.random_tokens)
        print(f"Measuring {source} ...", file=sys.stderr)
        reports.append(replace(analyze_signal(model, input_ids), model=label(source)))
        if not args.json:
            print(reports[-1], end="\n\n")
    args.output.mkdir(parents=True, exist_ok=True)
    settings = {"tokens": args.tokens, "batch_size": args.batch_size, "seed": args.seed}
    results = {"settings": settings, "models": [report.to_dict() for report in reports]}
    written = json.dumps(results, indent=1, ensure_ascii=False)
    if args.json:
        print(written)
    (args.output / "signal.json").write_text(written + "\n", encoding="utf-8")
    save_figure(signal_figure(reports), picture, PIXELS_PER_INCH)
    print(f"Wrote {args.output / 'signal.json'} and {picture}.", file=sys.stderr if args.json else sys.stdout)


def _load(source: str, seed: int) -> Any:
    try:
        return load_model(source, seed)
    except CheckpointError as error:
        if Path(source).exists():
            raise
        raise CheckpointError(f"{error} The names of blocks are {', '.join(NAMED_BLOCKS)}.") from error
