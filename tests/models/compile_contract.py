"""What every family satisfies when it is compiled or exported; a part of `FamilyContract`."""

from typing import Any

import pytest
import torch
from models_cases import TOLERANCE, Case, head_inputs, random_ids


class CompileContract:
    """The promises about graphs: whole ones, one for all lengths, and exported ones."""

    def test_compiles_without_graph_breaks(self, traced_case: Case) -> None:
        model = traced_case.model(**traced_case.fewest_layers).train()
        inputs = {**head_inputs(traced_case.main_head), "use_cache": False}
        torch._dynamo.reset()
        actual = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
        actual.backward()
        # behind it: a model that has been called before knows its patterns
        expected = model(**inputs).loss
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_lengths_do_not_recompile(self, traced_case: Case) -> None:
        """One graph for all lengths."""
        model, graphs = traced_case.model(**traced_case.fewest_layers), []
        torch._dynamo.reset()

        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=count, dynamic=True)
        with torch.no_grad():
            for tokens in (9, 16, 58):
                compiled(input_ids=random_ids(2, tokens), use_cache=False)
        assert len(graphs) == 1

    @pytest.mark.parametrize("is_masked", [True, False], ids=["masked, with labels", "tokens alone"])
    def test_exports_with_any_batch_and_length(self, traced_case: Case, is_masked: bool) -> None:
        model = traced_case.model(**traced_case.fewest_layers)
        model.config.use_cache = False

        def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
            found = head_inputs(traced_case.main_head, rows, tokens)
            return found if is_masked else {"input_ids": found["input_ids"]}

        example = inputs(3, 12)
        dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
        shapes = {name: {dim: dims[dim] for dim in range(given.ndim)} for name, given in example.items()}
        program = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
        for sizes in ((2, 31), (1, 9)):
            actual, expected = program(**inputs(*sizes)), model(**inputs(*sizes))
            torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
            torch.testing.assert_close(actual.loss, expected.loss, atol=TOLERANCE, rtol=TOLERANCE)
