"""Files as a user of the examples brings them: tiny checkpoints, and rows with the columns of every task."""

from pathlib import Path

import torch
from example_data import new_tokenizer
from run_example import write_rows
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
)

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

# what each example needs besides rows: a checkpoint, and options that keep it small
OWN = {
    "run_classification": ["encoder", "--max_seq_length", "64"],
    "run_clm": ["decoder", "--block_size", "32"],
    "run_lora": ["decoder", "--block_size", "32", "--left", "4"],
    "run_mlm": ["bert", "--max_seq_length", "32", "--attention_window", "8"],
    "run_qa": ["encoder", "--max_seq_length", "96", "--doc_stride", "16"],
    "run_sentence_embeddings": [
        "bert",
        "--max_seq_length",
        "32",
        "--attention_window",
        "8",
        "--short_seq_length",
        "16",
    ],
    "run_seq2seq": ["seq2seq", "--source_column", "text", "--target_column", "summary", "--max_target_length", "8"],
}


def own(script: str, *more: str) -> list[str]:
    """Return the arguments that let an example read `rows.jsonl` and its checkpoint."""
    checkpoint, *options = OWN[script]
    given = ["--model_name_or_path", checkpoint, "--train_file", "rows.jsonl", "--disable_tqdm", "True"]
    return [*given, "--max_steps", "2", "--max_eval_samples", "4", *options, *more]


def rows(num: int) -> list[dict]:
    """Return rows that every example can read."""
    found = []
    for number in range(num):
        words = [f"w{(number * place) % 17}" for place in range(40)]
        text, word = " ".join([f"entry {number}", *words]), words[1]
        found.append(
            {
                "text": text,
                "label": ("ham", "spam")[number % 2],
                "question": f"What comes second in {number}?",
                "context": text,
                "answers": {"text": [word], "answer_start": [text.index(word)]},
                "query": f"entry {number}",
                "document": text,
                "summary": f"entry {number}",
            }
        )
    return found


def write_own_files(folder: Path) -> None:
    """Write `rows.jsonl`, and one checkpoint of each kind."""
    torch.manual_seed(0)
    write_rows(folder / "rows.jsonl", rows(40))
    tokenizer = new_tokenizer([row["text"] for row in rows(40)], vocab_size=300)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
    shape |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    band, layer = {"attention_pattern": Band(4, 4)}, {"num_hidden_layers": 1}
    pair = {"encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": tokenizer.bos_token_id}
    models = {
        "encoder": AutoModel.from_config(hea.SparseTransformerConfig(**shape, **layer, **band)),
        "decoder": AutoModelForCausalLM.from_config(LlamaConfig(**shape, **layer)),
        "seq2seq": AutoModelForSeq2SeqLM.from_config(hea.SparseSeq2SeqConfig.vanilla(**shape, **pair)),
        "bert": BertForMaskedLM(BertConfig(**shape, **layer, max_position_embeddings=16)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
