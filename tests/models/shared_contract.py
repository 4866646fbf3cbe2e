"""What every family satisfies, encoder-decoders included, of dropout and inputs; `test_shared_contract.py` runs it."""

from typing import Any

import torch
from models_cases import switch_off_dropout
from torch import Tensor


def first_tensor(output: Any) -> Tensor:
    """Return the main output of any head."""
    return next(output[name] for name in ("logits", "start_logits", "last_hidden_state") if name in output)


class SharedContract:
    """One method a promise; `case` and `auto_class` are parametrised by `test_shared_contract.py`."""

    def test_without_dropout_training_computes_what_evaluation_does(self, case: Any, auto_class: str) -> None:
        """Dropout stands where the ecosystem looks for it: in `nn.Dropout`, attention weights included."""
        fields = {name: 0.5 for name in case.config().to_dict() if name.endswith("_dropout")}
        assert {"attention_dropout", "classifier_dropout", "embedding_dropout", "hidden_dropout"} <= fields.keys()
        model, inputs = case.model(auto_class, **fields), case.inputs(auto_class)
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            model.train()
            assert not torch.equal(first_tensor(model(**inputs)), expected)
            switch_off_dropout(model)
            torch.testing.assert_close(first_tensor(model(**inputs)), expected, atol=1e-6, rtol=1e-5)

    def test_attention_dropout_acts_in_training_only(self, case: Any) -> None:
        fields = {name: 0.0 for name in case.config().to_dict() if name.endswith("_dropout")}
        model, inputs = case.model(**{**fields, "attention_dropout": 0.5}), case.inputs()
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            assert torch.equal(first_tensor(model(**inputs)), expected)
            assert not torch.allclose(first_tensor(model.train()(**inputs)), expected, atol=1e-3)
