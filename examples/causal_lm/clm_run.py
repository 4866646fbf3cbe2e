"""A run: its arguments checked, its text cut into blocks, before any training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from shared.arguments import UsageError

import hf_efficient_attn as hea
from causal_lm.clm_arguments import ClmTrainingArguments, DataTrainingArguments, ModelArguments
from causal_lm.run_folder import check_resume_value, check_run_folder
from causal_lm.token_blocks import TokenBlocks, prepare_token_blocks


@dataclass(frozen=True)
class Run:
    """Everything the blocks of one run share."""

    model: ModelArguments
    data: DataTrainingArguments
    training: ClmTrainingArguments
    blocks: TokenBlocks

    @property
    def folder(self) -> Path:
        return Path(self.training.output_dir)

    @property
    def corpus(self) -> dict[str, Any]:
        return {"source": self.data.source, **self.blocks.describe()}

    def say(self, text: str) -> None:
        """Print on the main process only."""
        if self.training.process_index == 0:
            print(text, flush=True)


def check_shape(block: str, shape: dict[str, Any]) -> None:
    """Raise now what `block` would refuse after the data is made."""
    try:
        hea.SimplifiedTransformerConfig(block=block, **shape)
    except (StrictDataclassError, ValueError) as error:
        raise UsageError(f"--config_overrides, block {block}: {error}") from error


def prepare_run(model: ModelArguments, data: DataTrainingArguments, training: ClmTrainingArguments) -> Run:
    """Check every argument, then make or load the token blocks."""
    check_resume_value(training)
    shape = model.config_fields()
    rates = {block: model.rates_of(block, training.learning_rate) for block in model.block_list()}
    for block in rates:
        check_shape(block, shape)
    folder = Path(training.output_dir)
    source = {**data.source_settings(), "tokenizer_name": model.tokenizer_name, "vocab_size": model.vocab_size}
    with training.main_process_first(desc="preparing the data"):
        if training.process_index == 0:
            check_run_folder(folder, {"data": source, "shape": shape, "rates": rates}, training)
        blocks = prepare_token_blocks(data, model.tokenizer_name, model.vocab_size, folder / "data")
    run = Run(model, data, training, blocks)
    corpus = run.corpus
    run.say(
        f"Corpus: {corpus['source']}. {corpus['train_tokens']:,} training tokens, {corpus['held_out_tokens']:,} "
        f"held-out tokens, a vocabulary of {corpus['vocab_size']:,}."
    )
    return run
