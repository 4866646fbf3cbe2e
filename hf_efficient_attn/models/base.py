"""What models of several families share: initialisation, capabilities, and the choice of a backend."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_efficient_attn.errors import CheckpointError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_NAMES, is_paged
from hf_efficient_attn.integration.model_info import refuse_overridden
from hf_efficient_attn.integration.unsupported import compare_processes, refuse_stages, refuse_uneven_vocabulary
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.library import PACKAGE, count_key_heads
from hf_efficient_attn.models.global_tokens.global_attention import CopiedLinear, GlobalAttention
from hf_efficient_attn.models.indexed.own_rotary import own_rotary
from hf_efficient_attn.models.inputs import (
    check_axes,
    check_sentences,
    padding_mask,
    prefetch_inputs,
    sentence_positions,
)
from hf_efficient_attn.models.parts.blocks import is_in_shards
from hf_efficient_attn.models.prologue import PreparedCall, prepare_call

# The backend for each attention implementation of transformers; all of them compute the model's own function.


BACKEND_OF_IMPLEMENTATION = {"efficient": "auto", "eager": "reference", "sdpa": "sdpa", "flex_attention": "flex"}


def backend_of(config: Any) -> str:
    """Return the backend for the attention implementation of a config.

    Raises:
        UnsupportedBackendError: an implementation that would ignore the model's attention pattern.
    """
    implementation = config._attn_implementation or "efficient"
    if implementation not in BACKEND_OF_IMPLEMENTATION:
        raise UnsupportedBackendError(
            f"attn_implementation={shown(implementation)} would drop the attention pattern of this "
            f"{type(config).__name__}. Use one of: {', '.join(BACKEND_OF_IMPLEMENTATION)}; all of these compute the "
            "same outputs."
        )
    return BACKEND_OF_IMPLEMENTATION[implementation]


# What a checkpoint says about itself, before any weight is read.


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def saved_config(path: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the config saved at `path`, a folder or Hub name; empty if there is none, which loading will report.

    kwargs: the arguments of `from_pretrained`; only those for the Hub are used.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    if path is None:
        return {}
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    again = "Copy or download the checkpoint again."
    no_table = f"The config.json of {path} is damaged: it is not a JSON object. {again}"
    try:
        found = PreTrainedConfig.get_config_dict(path, **hub)[0]
    except OSError as error:
        # transformers raises OSError both for a missing file and for one that is not JSON
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise CheckpointError(f"The config.json of {path} is damaged: it is not JSON. {again}") from error
        return {}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        # JSON, but not an object, or nested too deeply
        raise CheckpointError(no_table) from error
    if not isinstance(found, dict):
        raise CheckpointError(no_table)
    return found


class FamilyPreTrainedModel(PreTrainedModel):
    """Base of all families: it checks the config, and lets modules initialise their own parameters."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_context_parallel = False
    _can_compile_fullgraph = True
    # whether default positions count only the tokens that are not padding
    counts_real_tokens = True
    # the error message for a mask matrix that masks pairs of real tokens; None: layers can mask any pairs
    closed_pairs: str | None = None
    # whether attention itself reads and writes the cache of continuous batching
    takes_paged_cache = False
    # how messages name a model without a cache; None: the model has a cache
    uncached: str | None = None
    # what the model is used for; set by its head
    task: str | None = None
    # (model, folder, name on the Hub): fills in the model card of a folder that is pushed; set by `hub.card`
    fill_card: ClassVar[Callable[[Any, Path, str], None] | None] = None

    def __init__(self, config: Any) -> None:
        config.check()  # fields may have been assigned since the config was built
        count_key_heads(config)
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do as transformers for classes outside this package; our own are saved with a stub (`hub.saving`)."""
        if not cls.__module__.startswith(PACKAGE):
            super().register_for_auto_class(auto_class)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Distribute the model as transformers does, but refuse settings that would compute something else."""
        if getattr(distributed_config, "pp_size", 1) > 1:
            refuse_stages(cls.__name__)
        if getattr(distributed_config, "fsdp_size", 1) > 1:
            model.register_forward_pre_hook(refuse_uneven_vocabulary)
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Upload as transformers does for `push_to_hub`, with a card that says what the layers attend to."""
        if self.fill_card is not None:
            self.fill_card(Path(working_dir), repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def index_rotary(self) -> Any:
        """Return the module that computes the rotary positions of all layers, for `index`.

        Raises:
            UnsupportedBackendError: the layers cannot have indexers.
        """
        return own_rotary(self)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Resolve the implementation as transformers does; the default is that of the config."""
        requested_attention = requested_attention or self.config.default_implementation
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return token embeddings, [B, T] → [B, T, hidden_size]."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def check_call(self, cache: Cache | None) -> None:
        """Raise UnsupportedBackendError for an attention implementation or a cache that the model cannot use."""
        config = self.config
        refuse_overridden(config._attn_implementation, f"{config.model_type} (with its own attention)")
        backend_of(config)
        if cache is not None and self.uncached is not None:
            raise UnsupportedBackendError(
                f"{self.uncached} attends only to its own tokens, and has no cache. Prefix tuning cannot give it keys; "
                "use prompt tuning or LoRA instead."
            )

    def prepare(
        self,
        input_ids: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        options: Mapping[str, Any],
        cache: Cache | None = None,
        use_cache: bool | None = False,
        token_type_ids: Tensor | None = None,
        read_on_host: Iterable[Any] = (),
    ) -> PreparedCall:
        """Check, embed and complete the inputs of a forward pass; every backbone calls this first.

        Args:
            attention_mask: 1 = token, 0 = padding, [B, K] over cached and new tokens, padded on either side; or [B, 1,
                T, K] with True or 0.0 = allowed. In models with `closed_pairs` such a matrix may mask only padding and,
                in a causal model, later tokens.
            position_ids: [B, T]; by default counted over the tokens that are not padding. If nothing is cached yet, a
                packed document begins wherever they restart; documents do not attend to each other.
            options: the call's other arguments.
            token_type_ids: which tokens belong to the first and to the second sentence, for `separate_sentences`.
            read_on_host: other tensors that the family needs on the CPU; they are copied together with the masks.

        Raises:
            InputError: inputs that contradict each other, or that the model does not take.
            UnsupportedBackendError: an attention implementation or a cache that the model cannot use.
        """
        check_axes(input_ids, inputs_embeds)
        self.check_call(cache)
        if self.takes_paged_cache and is_paged(cache):
            cache, options = None, {**options, "cache": cache}
        prefetch_inputs(*read_on_host)
        compare_processes(self)
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.closed_pairs is not None:
            batch_size, is_causal = embedded.shape[0], self.config.is_causal
            attention_mask = padding_mask(attention_mask, batch_size, self.closed_pairs, is_causal)
        if getattr(self.config, "separate_sentences", False):
            check_sentences(token_type_ids, position_ids, embedded, options)
            position_ids = sentence_positions(token_type_ids, attention_mask)
        return prepare_call(self.config, embedded, attention_mask, position_ids, cache, options, use_cache)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialize"):
            module.initialize()

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether `generate` compiles its steps: as in transformers, but never if layers keep sums.

        transformers compiles the steps with a static cache on GPUs, and asks before the first step. In that step,
        layers that keep sums replace the cache layers by their own kind, which cannot be compiled.
        """
        keeps_sums = any(getattr(module, "keeps_sums", False) for module in self.modules())
        return not keeps_sums and super()._valid_auto_compile_criteria(*args, **kwargs)


class EfficientPreTrainedModel(FamilyPreTrainedModel):
    """Base of the families whose attention layers do not attend to every key.

    The model says which keys a query attends to; `attn_implementation` says how this is computed: "efficient" (default)
    with the fastest backend, "eager" by the formula, "sdpa" densely with a mask, "flex_attention" with flex.
    """

    _supports_flash_attn = False
    _supports_attention_backend = False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers guesses this from a module's source code; here every layer asks the config in every call
        return True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel.from_pretrained` does, but refuse checkpoints of other families."""
        saved = saved_config(pretrained_model_name_or_path, kwargs)
        family = cls.config_class.model_type
        if saved.get("model_type", family) != family:
            path = pretrained_model_name_or_path
            raise CheckpointError(
                f"{path} holds a {shown(saved['model_type'])} model; {cls.__name__} loads {shown(family)}. "
                f"Try `hf-efficient-attn convert {path} NEW_FOLDER`, which converts some other models."
            )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


class SparsePreTrainedModel(EfficientPreTrainedModel):
    """Base of the families with global tokens."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Build a model as transformers does; under ZeRO-3, then copy the projections that start as copies.

        While ZeRO-3 initialises a module, it gathers only that module, so the source of the copy is not available.
        """
        model = super()._from_config(config, **kwargs)
        if any(map(is_in_shards, model.parameters())):
            model.copy_local_to_global()
        return model

    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        """Initialise as transformers does; under ZeRO-3, then copy the missing `CopiedLinear` maps."""
        missing = [
            module
            for module in self.modules()
            if isinstance(module, CopiedLinear) and not getattr(module.weight, "_is_hf_initialized", False)
        ]
        super()._initialize_missing_keys(*args, **kwargs)
        for module in missing:
            if is_in_shards(module.weight):
                module.copy_source()

    @torch.no_grad()
    def copy_local_to_global(self) -> None:
        """Copy the local projections to those of global tokens again, in every layer.

        Masked language modelling without global tokens never trains the copies, so the authors of Longformer copy
        again before fine-tuning.
        """
        for module in self.modules():
            if isinstance(module, GlobalAttention):
                module.copy_local()
