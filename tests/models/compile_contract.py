"""What every family satisfies when it is compiled or exported; a part of `FamilyContract`."""

import torch
from models.shared_checks import check_compiled_training, check_exported
from models_cases import Case, head_inputs


class CompileContract:
    """The promises about graphs, whole ones and exported ones; `precision_contract.py` has one for all lengths."""

    def test_compiles_without_graph_breaks(self, traced_case: Case) -> None:
        model = traced_case.model(**traced_case.fewest_layers).train()
        check_compiled_training(model, {**head_inputs(traced_case.main_head), "use_cache": False})

    def test_exports_with_any_batch_and_length(self, traced_case: Case, is_masked: bool) -> None:
        model = traced_case.model(**traced_case.fewest_layers)
        model.config.use_cache = False

        def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
            found = head_inputs(traced_case.main_head, rows, tokens)
            return found if is_masked else {"input_ids": found["input_ids"]}

        dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
        shapes = {name: {dim: dims[dim] for dim in range(given.ndim)} for name, given in inputs(3, 12).items()}
        check_exported(model, inputs, shapes, [(3, 12), (2, 31), (1, 9)])
