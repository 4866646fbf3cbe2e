"""Configuration of the local encoder."""

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.choices import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, HeadSizes
from hf_efficient_attn.models.config.library import LibraryConfig, check_given_pattern


@strict_config
class LocalEncoderConfig(DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig):
    """Describe an encoder whose tokens read `reach_tokens` on either side."""

    model_type = "local_encoder"

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    reach_tokens: int = 2
    is_causal: bool = False

    hidden_act: str = "gelu"
    norm_type: str = "layernorm"
    norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02

    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    # what the parts ask for, and is the same in every local encoder
    position_embedding_type = "learned"
    scale_embedding = False
    embedding_norm = True
    mlp_bias = True

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields."""
        check_fields(self, {})
        self.check_head_sizes()
        check_given_pattern(self)
        if self.is_causal:
            raise ConfigurationError("is_causal=True: a local encoder reads both sides; use AdaptiveSpanConfig.")
        if self.reach_tokens < 0:
            raise ConfigurationError(f"reach_tokens={self.reach_tokens} counts tokens on either side; use 0 or more.")


__all__ = ["LocalEncoderConfig"]
