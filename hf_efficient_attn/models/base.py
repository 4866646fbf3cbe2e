"""What models of several families share: start values, capabilities, and the choice of a kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_efficient_attn.attention.cache_argument import CACHE_NAMES
from hf_efficient_attn.attention.refusals import refuse_stages, refuse_uneven_vocabulary
from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.checkpoints import saved_config
from hf_efficient_attn.models.config.library import PACKAGE, count_key_heads
from hf_efficient_attn.models.global_tokens.projections import CopiedLinear, GlobalAttention
from hf_efficient_attn.models.indexed.own_rotary import own_rotary
from hf_efficient_attn.models.parts.deepspeed_parameters import is_in_shards


class FamilyPreTrainedModel(PreTrainedModel):
    """Base of all families: configs are checked, and modules with start values of their own set them."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_context_parallel = False
    _can_compile_fullgraph = True
    # whether positions that are not given are counted over the tokens that are not padding
    counts_real_tokens = True
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
        """As transformers', for classes of others; those of this package are saved with a stub (`hub.saving`)."""
        if not cls.__module__.startswith(PACKAGE):
            super().register_for_auto_class(auto_class)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but refuses what would compute something else."""
        if getattr(distributed_config, "pp_size", 1) > 1:
            refuse_stages(cls.__name__)
        if getattr(distributed_config, "fsdp_size", 1) > 1:
            model.register_forward_pre_hook(refuse_uneven_vocabulary)
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which `push_to_hub` calls, with a card that says what the attention reads."""
        if self.fill_card is not None:
            self.fill_card(Path(working_dir), repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def index_rotary(self) -> Any:
        """Return the module of the rotary positions that all layers have, for `index`.

        Raises:
            UnsupportedBackendError: the layers cannot have indexers.
        """
        return own_rotary(self)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As transformers', with the config's own by default."""
        requested_attention = requested_attention or self.config.default_implementation
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialize"):
            module.initialize()

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """As transformers', which on GPUs compiles the steps of a static cache, and asks before the first step.

        Layers that keep sums get a cache of their own kind in that step, which cannot be compiled.
        """
        keeps_sums = any(getattr(module, "keeps_sums", False) for module in self.modules())
        return not keeps_sums and super()._valid_auto_compile_criteria(*args, **kwargs)


class EfficientPreTrainedModel(FamilyPreTrainedModel):
    """Base of the families whose attention layers do not read every key.

    Which keys are read is part of the model; `attn_implementation` says how that is computed: "efficient" (default) by
    the fastest backend, "eager" by the formula, "sdpa" densely with a mask, "flex_attention" by flex.
    """

    _supports_flash_attn = False
    _supports_attention_backend = False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers guesses from the source of a module; here every layer asks the config at every call
        return True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`; refuses the checkpoint of another family and says how to convert it."""
        saved = saved_config(pretrained_model_name_or_path, kwargs)
        family = cls.config_class.model_type
        if saved.get("model_type", family) != family:
            path = pretrained_model_name_or_path
            raise CheckpointError(
                f"{path} holds a {shown(saved['model_type'])} model; {cls.__name__} reads {shown(family)}. "
                f"`hf-efficient-attn convert {path} NEW_FOLDER` converts it, if it can be converted."
            )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


class SparsePreTrainedModel(EfficientPreTrainedModel):
    """Base of the families with global tokens."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """As transformers'; ZeRO-3 gathers a map without the one that it starts as a copy of, which is copied then."""
        model = super()._from_config(config, **kwargs)
        if any(map(is_in_shards, model.parameters())):
            model.copy_local_to_global()
        return model

    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'; under ZeRO-3, maps that are missing are copied then."""
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

        Masked language modelling without global tokens never trains the copies. The authors of Longformer therefore
        copy again between it and fine-tuning.
        """
        for module in self.modules():
            if isinstance(module, GlobalAttention):
                module.copy_local()
