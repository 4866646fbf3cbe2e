"""Speed, memory and size of the blocks, compared with each other and with transformers' GPT-2 of the same shape.

All models are in memory at once and timed in turns: in float32 this takes about 12 bytes per parameter, for weights and
AdamW. Each step is one of real training, in the chosen dtype throughout. Speeds are in tokens per second, memory is in
MiB. `--counts`, as the only option, prints the parameter counts of the paper's models:
    python model_cards/benchmarks/blocks.py --quick
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contest import Built, Contest
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, GPT2Config, PreTrainedModel
from transformers.activations import ACT2FN

from hf_efficient_attn.bench.report import MEBIBYTE, NONE, PALETTE, Line, Panel, Row, markdown_table
from hf_efficient_attn.bench.timing import Case, summarize, times_faster
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.simplified_transformer.centering import block_masks
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES
from hf_efficient_attn.training.optimizer_groups import optimizer_groups

GPT2 = "gpt2"
# speed ratios are against this model, or if it is not measured against the first model
REFERENCE = "pre_ln"
# measure → its title; in the results, the speed against the reference has the same key
MEASURES = {
    "training": "training, whole model",
    "layers": "training, layers alone",
    "prefill": "reading a prompt (prefill)",
    "decode": "decoding with a cache",
}
GPT2_FIELDS: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SEED = 0
FOOTNOTE = """\
Tied parameters count once. The paper counts differently from model to model: its figures for GPT with 18 layers hold
everything, those for BERT and for depth 72 the weight matrices only: norms, gains, biases and position tables are left
out. For depth 72 the figure is the sum of the matrices of the shapes it gives."""


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common, and what is timed of them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    hidden_act: str
    batch_size: int
    tokens: int
    prompt_tokens: int
    decode_tokens: int
    decode_batch_size: int
    compile: bool
    dtype: str
    device: str

    @property
    def num_positions(self) -> int:
        """Length in tokens of the position table: that of the longest sequence."""
        return max(self.tokens, self.prompt_tokens + self.decode_tokens)

    def config(self, name: str) -> SimplifiedTransformerConfig | GPT2Config:
        """Return the config of this shape for a block of ours, or of transformers' GPT-2 (`gpt2`), without dropout."""
        if name == GPT2:
            return GPT2Config(
                n_embd=self.hidden_size,
                n_layer=self.num_layers,
                n_head=self.num_heads,
                n_inner=self.intermediate_size,
                vocab_size=self.vocab_size,
                n_positions=self.num_positions,
                activation_function=self.hidden_act,
                **GPT2_FIELDS,
            )
        return SimplifiedTransformerConfig(
            block=name,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.num_positions,
            position_embedding_type="learned",
            hidden_act=self.hidden_act,
        )


def build_model(name: str, shape: Shape) -> PreTrainedModel:
    """Return the language model called `name`, with new weights and SDPA as attention."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        shape.config(name), attn_implementation="sdpa", dtype=getattr(torch, shape.dtype)
    )
    model = model.to(shape.device)
    model.loss_type = "ForCausalLM"  # GPT-2's default; unless it is set, GPT-2 warns, which breaks the compiled graph
    if shape.compile:
        model.compile()
    return model


def random_tokens(model: PreTrainedModel, batch_size: int, tokens: int) -> torch.Tensor:
    """Return random token ids, the same for every model of one vocabulary. Shape [batch_size, tokens]."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (batch_size, tokens), generator=generator).to(model.device)


def training_step(model: PreTrainedModel, input_ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that trains for one step: forward, loss, backward, AdamW as in Trainer, gradients freed."""
    optimizer = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_layers(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the output of the blocks alone for `hidden_states`, as the model calls them in causal training.

    Shapes: [batch, tokens, hidden] → the same.
    """
    backbone: Any = model.base_model
    if model.config.model_type == GPT2:
        for layer in backbone.h:
            hidden_states = layer(hidden_states)
        return hidden_states
    masks = block_masks(backbone.config, prepare_call(backbone.config, hidden_states, None, None, None, {}))
    for layer in backbone.layers:
        hidden_states = layer(hidden_states, **masks)[0]
    return hidden_states


def training_case(model: PreTrainedModel, batch_size: int, tokens: int) -> Case:
    """Return the case of one training step of the whole model on `batch_size` × `tokens` tokens."""
    step = training_step(model, random_tokens(model, batch_size, tokens))
    return Case(lambda _: step(), prepare=model.train)


def layers_case(model: PreTrainedModel, batch_size: int, tokens: int, is_compiled: bool) -> Case:
    """Return the case of forward and backward through the blocks alone, from a random hidden state.

    Only the blocks run: no embedding, final norm, head, loss or optimizer. The hidden state gets a gradient.
    """
    generator = torch.Generator().manual_seed(SEED)
    size = (batch_size, tokens, model.config.hidden_size)
    hidden_states = torch.randn(size, generator=generator).to(model.device, model.dtype)
    target = torch.randn(size, generator=generator).to(model.device, model.dtype)
    forward = torch.compile(run_layers) if is_compiled else run_layers

    def prepare() -> torch.Tensor:
        model.train().zero_grad()
        return hidden_states.clone().requires_grad_()

    return Case(lambda inputs: forward(model, inputs).backward(target), prepare)


def prefill_case(model: PreTrainedModel, batch_size: int, tokens: int) -> Case:
    """Return the case of a prefill of `batch_size` prompts of `tokens` tokens into a new cache."""
    input_ids = random_tokens(model, batch_size, tokens)
    return Case(lambda _: _read(model, input_ids, None), prepare=model.eval)


def decode_case(model: PreTrainedModel, batch_size: int, prompt_tokens: int, decode_tokens: int) -> Case:
    """Return the case of `decode_tokens` greedy steps with a cache that holds a prompt; the prefill is not timed."""
    prompt = random_tokens(model, batch_size, prompt_tokens)

    def prepare() -> Any:
        model.eval()
        return _read(model, prompt, None)

    def run(output: Any) -> None:
        for _ in range(decode_tokens):
            output = _read(model, output.logits[:, -1:].argmax(-1), output[CACHE_ARGUMENT])

    return Case(run, prepare)


@torch.no_grad()
def _read(model: PreTrainedModel, input_ids: torch.Tensor, cache: Any) -> Any:
    return model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of `all` parameters and of those in `weight_matrices`, tied ones once.

    Weight matrices are the 2-D parameters except position tables: no norms, gains or biases.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables = embeddings - {id(model.get_input_embeddings().weight)}
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2 and id(parameter) not in tables]
    return {"all": model.num_parameters(), "weight_matrices": sum(matrix.numel() for matrix in matrices)}


def build(name: str, shape: Shape) -> Built:
    """Return a new model with its timed cases and its parameter counts."""
    model, size = build_model(name, shape), (shape.batch_size, shape.tokens)
    cases = {
        "training": training_case(model, *size),
        "layers": layers_case(model, *size, shape.compile),
        "prefill": prefill_case(model, *size),
        "decode": decode_case(model, shape.decode_batch_size, shape.prompt_tokens, shape.decode_tokens),
    }
    return Built(cases, {"parameters": count_parameters(model)}, {"decode": shape.decode_tokens})


def check(settings: dict[str, Any]) -> None:
    """Raise ConfigurationError for a shape that no model can have."""
    for dtype in settings["dtype"]:
        shape = CONTEST.shape_of(dtype, None, settings, torch.device("cpu"))
        for name in settings["models"]:
            shape.config(name)


def finish(results: dict[str, Any]) -> None:
    """Add speeds in tokens per second, and how many times as fast a model is as the reference, round by round."""
    settings, rows = results["settings"], results["results"]
    tokens = settings["batch_size"] * settings["tokens"]
    results["reference"] = REFERENCE if REFERENCE in settings["models"] else settings["models"][0]
    results["pre_ln_against_gpt2"] = {}
    timed = {(row["dtype"], row["model"]): {name: row.pop(name)["samples"] for name in MEASURES} for row in rows}

    def speeds(dtype: str, name: str, other: str) -> dict[str, dict[str, float]]:
        return {each: times_faster(timed[dtype, name][each], timed[dtype, other][each]) for each in MEASURES}

    for row in rows:
        samples = timed[row["dtype"], row["model"]]
        for measure in ("training", "layers", "prefill"):
            row[f"{measure}_tokens_per_second"] = summarize([1000 * tokens / each for each in samples[measure]])
        row["decode_milliseconds_per_token"] = summarize(samples["decode"])
        row["speed_against_reference"] = speeds(row["dtype"], row["model"], results["reference"])
    if {REFERENCE, GPT2} <= set(settings["models"]):
        results["pre_ln_against_gpt2"] = {dtype: speeds(dtype, REFERENCE, GPT2) for dtype in settings["dtype"]}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of each dtype, followed by a line that compares Pre-LN with GPT-2."""
    against = f"× {results['reference']}"
    header = ["model", "training tok/s", against, "layers tok/s", against, "prefill tok/s", against]
    header += ["decode ms/tok", against, "peak MiB", "parameters M", "matrices M"]
    found = {}
    for dtype in results["settings"]["dtype"]:
        found[dtype] = markdown_table(header, [_cells(row) for row in results["results"] if row["dtype"] == dtype])
        if ratios := results["pre_ln_against_gpt2"].get(dtype):
            speeds = ", ".join(f"{title} {_ratio(ratios[measure])}" for measure, title in MEASURES.items())
            found[dtype] += f"\n\n`pre_ln` against transformers' GPT-2: {speeds}."
    return found


def _cells(row: Row) -> list[str]:
    cells = [row["model"]]
    for measure in ("training", "layers", "prefill"):
        speed = row[f"{measure}_tokens_per_second"]["median"]
        cells += [f"{speed:,.0f}", _ratio(row["speed_against_reference"][measure])]
    cells += [f"{row['decode_milliseconds_per_token']['median']:.2f}", _ratio(row["speed_against_reference"]["decode"])]
    peak = row["peak_memory_bytes"]
    cells.append(NONE if peak is None else f"{peak / MEBIBYTE:,.0f}")
    return cells + [f"{row['parameters'][count] / 1e6:.2f}" for count in ("all", "weight_matrices")]


def _ratio(summary: dict[str, float]) -> str:
    return f"{summary['median']:.2f} ({summary['first_quartile']:.2f}–{summary['third_quartile']:.2f})"


def panels(results: dict[str, Any]) -> list[Panel]:
    """Return the panels: speed against the reference by measure, memory, and parameters."""
    settings, rows = results["settings"], results["results"]

    def bars(value: Callable[[Row], float | None]) -> list[Line]:
        found = []
        for row in rows:
            amount, color = value(row), PALETTE[settings["dtype"].index(row["dtype"])]
            points = [] if amount is None else [(settings["tokens"], amount)]
            found.append(Line(f"{row['model']}, {row['dtype']}", points, {"color": color}))
        return found

    unit = f"speed against {results['reference']} (×)"
    drawn = [
        Panel(title.capitalize(), unit, bars(lambda row, name=name: row["speed_against_reference"][name]["median"]))
        for name, title in MEASURES.items()
    ]
    peaks = bars(lambda row: None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE)
    drawn.append(Panel("Peak memory of a training step", "MiB above the weights", peaks))
    drawn.append(Panel("Parameters", "millions", bars(lambda row: row["parameters"]["all"] / 1e6)))
    return [panel for panel in drawn if any(line.points for line in panel.lines)]


CONTEST = Contest(
    __file__,
    title="Blocks: {num_layers} layers, width {hidden_size}, {num_heads} heads, MLP {intermediate_size}",
    kind="model",
    contestants={**dict.fromkeys(BLOCK_STYLES, "a block of ours"), GPT2: "transformers' GPT-2"},
    shape=Shape,
    build=build,
    lengths=(),
    counts={
        "hidden_size": (768, "width of the models"),
        "num_layers": (6, "blocks per model; SAS keeps W^V in the first alone, so more depth helps it slightly"),
        "num_heads": (12, "attention heads"),
        "intermediate_size": (3072, "width of the MLP"),
        "vocab_size": (8192, "rows of the tied embedding"),
        "batch_size": (8, "sequences per training step and prefill"),
        "tokens": (128, "tokens per sequence in training and prefill"),
        "prompt_tokens": (128, "tokens in the cache before decoding"),
        "decode_tokens": (32, "greedy steps per repeat"),
        "decode_batch_size": (1, "sequences decoded at once"),
    },
    options={
        "--hidden-act": {
            "choices": sorted(ACT2FN),
            "default": "relu",
            "metavar": "NAME",
            "help": "activation of all models, also of GPT-2, by its name in transformers (default relu)",
        },
        "--dtype": {
            "nargs": "+",
            "choices": ("float32", "bfloat16"),
            "default": ["float32"],
            "help": "dtype of weights and activations (default float32)",
        },
        "--compile": {"action": "store_true", "help": "run everything through torch.compile"},
    },  # fmt: skip
    quick={"models": [REFERENCE, "sas_p", GPT2], "num_layers": 2},
    group="dtype",
    measures=MEASURES,
    check=check,
    finish=finish,
    tables=tables,
    panels=panels,
    about="× is the speed against the reference in the same round, median and quartiles, above 1 = faster. Training: "
    "{batch_size} × {tokens} tokens a step; whole = forward, loss, backward, AdamW; layers = forward and "
    "backward of the blocks alone. Decode: batch {decode_batch_size}, {decode_tokens} steps after {prompt_tokens} "
    "tokens. Peak: of a training step, above the weights. Matrices: 2-D parameters without position tables.",
    max_seconds=600,
)


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: its config for a block, which count its figures give, and the figures of the blocks."""

    name: str
    config: Callable[[str], SimplifiedTransformerConfig]
    counted: str
    figures: dict[str, str]


def _deep_gpt(block: str) -> SimplifiedTransformerConfig:
    return SimplifiedTransformerConfig.codeparrot_gpt(block, num_hidden_layers=72, intermediate_size=1536)


PAPER_MODELS = (
    PaperModel("GPT, 18 layers", SimplifiedTransformerConfig.codeparrot_gpt, "all", {"pre_ln": "167M", "sas": "146M"}),
    PaperModel(
        "BERT, 16 layers",
        SimplifiedTransformerConfig.crammed_bert,
        "weight_matrices",
        {"pre_ln": "120M", "sas": "101M"},
    ),
    PaperModel("GPT, 72 layers, MLP 2d", _deep_gpt, "weight_matrices", {"pre_ln": "378.1M", "sas": "293.8M"}),
)


def paper_counts() -> list[dict[str, Any]]:
    """Return one row per model and block: `model`, `block`, `all`, `weight_matrices`, `paper`, `counted` and `saved`.

    `counted` names which of the two counts the paper's figure is; `saved` is the share of it that the block saves
    against `pre_ln`.
    """
    rows = []
    for model in PAPER_MODELS:
        full = _count(model.config("pre_ln"))[model.counted]
        for block, figure in model.figures.items():
            counts = _count(model.config(block))
            saved = 1 - counts[model.counted] / full
            row = {"model": model.name, "block": block, **counts}
            rows.append({**row, "paper": figure, "counted": model.counted, "saved": saved})
    return rows


def _count(config: SimplifiedTransformerConfig) -> dict[str, int]:
    auto_class = AutoModelForCausalLM if config.is_causal else AutoModelForMaskedLM
    with torch.device("meta"):
        return count_parameters(auto_class.from_config(config))


def counts_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `paper_counts` as a Markdown table with a footnote."""
    header = ["model", "block", "all", "weight matrices", "paper", "the paper counts", "saved"]
    cells = [
        [
            row["model"],
            row["block"],
            f"{row['all'] / 1e6:.2f}M",
            f"{row['weight_matrices'] / 1e6:.2f}M",
            row["paper"],
            row["counted"].replace("_", " "),
            f"{row['saved']:.1%}" if row["saved"] else "–",
        ]
        for row in rows
    ]
    return f"{markdown_table(header, cells)}\n\n{FOOTNOTE}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--counts"]:
        print(counts_table(paper_counts()))
    else:
        CONTEST.run(__doc__)
