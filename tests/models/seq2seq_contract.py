"""What only encoder-decoder families satisfy; `shared_contract.py` has what all do, `contract.py` the rest."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from models.seq2seq_compile_contract import Seq2SeqCompileContract
from models.seq2seq_masks_contract import Seq2SeqMasksContract
from models_cases import TOLERANCE, checkpoint_activations, first_tensor, scalar
from seq2seq_cases import Seq2SeqCase, head_inputs, random_ids
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_efficient_attn as hea


class Seq2SeqContract(Seq2SeqMasksContract, Seq2SeqCompileContract):
    """One method a promise; `case` and `auto_class` are parametrised by `test_seq2seq_contract.py`."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_save_and_load_is_bit_equal(
        self, case: Seq2SeqCase, auto_class: str, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        model = case.model(auto_class).to(dtype)
        model.save_pretrained(tmp_path)
        again = getattr(transformers, auto_class).from_pretrained(tmp_path, dtype=dtype).eval()
        pattern = "attention_pattern"
        assert getattr(again.config, pattern, None) == getattr(model.config, pattern, None)
        state, loaded = model.state_dict(), again.state_dict()
        assert state.keys() == loaded.keys()
        for key in state:
            assert torch.equal(state[key], loaded[key]), key
        for (name, buffer), (other, loaded_buffer) in zip(model.named_buffers(), again.named_buffers(), strict=True):
            assert name == other
            assert torch.equal(buffer, loaded_buffer), name
        inputs = head_inputs(auto_class)
        with torch.no_grad():
            # equal weights at another memory alignment may take another kernel: equal to rounding, not to the bit
            tolerance = 1e-6 if dtype == torch.float32 else 1e-1
            expected, actual = first_tensor(model(**inputs)), first_tensor(again(**inputs))
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    def test_names_that_parallelism_relies_on(self, case: Seq2SeqCase) -> None:
        backbone = case.model("AutoModel")
        assert {"embed_tokens", "encoder", "decoder"} == dict(backbone.named_children()).keys()
        layers = [*backbone.encoder.layers, *backbone.decoder.layers]
        assert {type(layer).__name__ for layer in layers} == set(backbone._no_split_modules)
        assert all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
        assert backbone._supports_context_parallel is False
        assert set(backbone.tp_plan) >= {f"{side}.layers.*.mlp.up_proj" for side in ("encoder", "decoder")}

    def test_one_embedding_for_source_target_and_output(self, case: Seq2SeqCase) -> None:
        model = case.model()
        assert model.lm_head.weight is model.get_input_embeddings().weight
        model.resize_token_embeddings(70, mean_resizing=False)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        logits = model(torch.tensor([[69, 5, 6]]), decoder_input_ids=torch.tensor([[1, 69]])).logits
        assert logits.shape == (1, 2, 70)
        # which libraries ask of the stacks, too; what is given to one of them is of the whole model
        for stack in (model.get_encoder(), model.get_decoder()):
            assert stack.get_input_embeddings() is model.get_input_embeddings()
            other = copy.deepcopy(model.get_input_embeddings())
            stack.set_input_embeddings(other)
            assert model.model.embed_tokens is other
            model.tie_weights()
            assert model.lm_head.weight is other.weight

    def test_heads_take_inputs_in_the_usual_order(self, case: Seq2SeqCase, auto_class: str) -> None:
        """Trainer passes on only the columns a forward names, and people pass the first by position."""
        parameters = list(inspect.signature(case.heads[auto_class].forward).parameters)
        first = ["input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "encoder_outputs"]
        assert parameters[1:6] == first
        of_family = getattr(case.heads[auto_class], "extra_inputs", ())
        assert {"inputs_embeds", "decoder_inputs_embeds", *of_family} <= set(parameters)

    def test_embeddings_in_the_place_of_tokens(self, case: Seq2SeqCase) -> None:
        model = case.model(**({"global_tokens": None} if hasattr(case.config_class, "global_tokens") else {}))
        ids, target = random_ids(2, 9), random_ids(2, 5)
        with torch.no_grad():
            expected = model(ids, decoder_input_ids=target).logits
            embedded = {"inputs_embeds": model.model.embed(ids), "decoder_inputs_embeds": model.model.embed(target)}
            torch.testing.assert_close(model(**embedded).logits, expected)

    # flex warns that it is not compiled, which the contracts of flex and of the other families do
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
    @pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
    def test_kernels_agree(self, case: Seq2SeqCase, kernel: str) -> None:
        model = case.model()
        inputs = head_inputs("AutoModelForSeq2SeqLM")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            expected = model(**inputs).logits
            model.set_attn_implementation(kernel)
            # which draw their blocks, or have nodes, by the length of each row
            if kernel == "flex_attention" and case.name.startswith(("seq2seq-bigbird_pegasus", "bp-seq2seq")):
                with pytest.raises(hea.UnsupportedBackendError, match="drawn anew for the length"):
                    model(**inputs)
                return
            actual = model(**inputs).logits
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    # what is trained on here is the states alone
    @pytest.mark.filterwarnings("ignore:The loss that is trained does not contain auxiliary_loss")
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_changes_no_gradient(
        self, case: Seq2SeqCase, auto_class: str, reentrant: bool
    ) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = case.model(auto_class, embedding_dropout=0.0, hidden_dropout=0.0).train()
            if checkpointing:
                checkpoint_activations(model, {"use_reentrant": reentrant})
            if checkpointing and reentrant:
                model.enable_input_require_grads()
            scalar(model(**head_inputs(auto_class))).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for plain, checkpointed in zip(*gradients, strict=True):
            torch.testing.assert_close(checkpointed, plain, atol=TOLERANCE, rtol=TOLERANCE)

    def test_offloaded_layers_compute_the_same(self, case: Seq2SeqCase, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path / "model")
        homes = {"lm_head": "cpu", "model.embed_tokens": "cpu"}
        for side in ("encoder", "decoder"):
            homes |= {f"model.{side}.embeddings": "cpu", f"model.{side}.norm": "cpu"}
            homes |= {f"model.{side}.layers.0": "cpu", f"model.{side}.layers.1": "disk"}
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path / "model", device_map=homes, offload_folder=tmp_path / "disk"
        )
        ids, target = random_ids(2, 9), random_ids(2, 5)
        with torch.no_grad():
            expected = model(ids, decoder_input_ids=target).logits
            torch.testing.assert_close(again(ids, decoder_input_ids=target).logits, expected, atol=1e-6, rtol=1e-6)

    def test_loaded_in_one_precision(self, case: Seq2SeqCase, tmp_path: Path) -> None:
        """Sharding (FSDP2) wants parameters of one dtype."""
        case.model().save_pretrained(tmp_path)
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}

    def test_serving_engines_are_refused(self, case: Seq2SeqCase) -> None:
        for engine in ("vllm", "sglang", "paged|eager"):
            model = case.model()
            model.config._attn_implementation = engine
            with pytest.raises(hea.UnsupportedBackendError, match="attention pattern"):
                model(random_ids(1, 4), decoder_input_ids=random_ids(1, 3))
