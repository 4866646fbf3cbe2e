"""What every encoder-decoder family satisfies when compiled or exported; a part of `Seq2SeqContract`."""

import torch
from models.shared_checks import check_compiled_training, check_exported
from seq2seq_cases import Seq2SeqCase, head_inputs
from torch import Tensor


class Seq2SeqCompileContract:
    """The promises about graphs, whole ones and exported ones; `precision_contract.py` has one for all lengths."""

    def test_compiles_without_graph_breaks(self, traced_case: Seq2SeqCase) -> None:
        model = traced_case.model(embedding_dropout=0.0, hidden_dropout=0.0, **traced_case.fewest_layers).train()
        check_compiled_training(model, head_inputs("AutoModelForSeq2SeqLM"))

    def test_exports_with_any_batch_and_length(self, traced_case: Seq2SeqCase, is_masked: bool) -> None:
        model = traced_case.model(use_cache=False, **traced_case.fewest_layers)

        def inputs(*sizes: int) -> dict[str, Tensor]:
            found = head_inputs("AutoModelForSeq2SeqLM" if is_masked else "AutoModel", *sizes)
            return found if is_masked else {name: found[name] for name in ("input_ids", "decoder_input_ids")}

        batch = torch.export.Dim("batch", min=1, max=64)
        source, target = (torch.export.Dim(name, min=3, max=60) for name in ("source", "target"))
        sides = {"input_ids": source, "attention_mask": source, "labels": target, "decoder_input_ids": target}
        shapes = {name: {0: batch, 1: sides[name]} for name in inputs(3, 12, 6)}
        check_exported(model, inputs, shapes, [(3, 12, 6), (2, 31, 11), (1, 9, 12)])
