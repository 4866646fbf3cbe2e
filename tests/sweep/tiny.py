"""Configs made tiny: the default one, with every size that is known by its name made small, sub-configs too."""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from sweep.classes import CAUSAL

VOCABULARY = 61
MAX_PARAMETERS = 8_000_000
# by the whole name of a field; others by the endings below
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "model_dim": 32,
    "embedding_size": 32, "d_embed": 32, "word_embed_proj_dim": 32, "projection_dim": 32, "decoder_hidden_size": 32,
    "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8,
    "hidden_dim": 64, "d_ff": 64, "n_inner": 64, "ffn_dim": 64, "dim_ff": 64, "intermediate_size": 64,
    "d_kv": 8, "d_inner": 64, "d_head": 8, "head_dim": 8, "d_key": 8,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "num_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 32, "expert_capacity": 64, "n_shared_experts": 1, "shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "intermediate_size_mlp": 64, "moe_top_k": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "image_size": 16, "patch_size": 4, "num_channels": 3,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_source_positions": 128,
    "max_target_positions": 128, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128,
    "sliding_window": 5, "local_attention": 6, "attention_chunk_size": 6, "window_size": 5,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 7, "index_block_size": 4,
    "index_topk_blocks": 2, "lru_width": 32, "attention_window_size": 5,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}
# what the rules below cannot know, by model type
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False, "hash_seed": 0},
    "led": {"attention_window": [8, 8], "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128},
    "glm4v_text": {"head_dim": 8, "rope_parameters": MROPE},
    "glm4v_moe_text": {"head_dim": 8, "rope_parameters": MROPE},
    "glm_image_text": {"head_dim": 8, "rope_parameters": MROPE},
    "glm_ocr_text": {"head_dim": 8, "rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "cosmos3_edge_text": {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2},
    "mistral": {"sliding_window": None},
    "ministral": {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
}
LARGE = ("Linear", "Embedding", "Conv2d", "Conv1D")
DROPPED = {"transformers_version", "architectures", "model_type", "torch_dtype", "dtype", "_name_or_path"}


# tried one after the other, where the one before cannot be built or computed
ATTEMPTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4})


def tiny_config(config_class: Any, kind: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of the class whose model has some ten thousand parameters."""
    default = config_class()
    fields = {**tiny_fields(default), **OWN_FIELDS.get(config_class.model_type, {}), **changes}
    if kind == CAUSAL and "is_decoder" in default.to_dict():
        fields["is_decoder"] = True
    return config_class(**fields)


def tiny_fields(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments that make a config like `default` tiny."""
    fields: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        inner = getattr(default, name, None) if name in default.sub_configs else None
        if isinstance(inner, PreTrainedConfig):
            part = {"is_decoder": True, "add_cross_attention": True} if name == "decoder" else {}
            fields[name] = type(inner)(**tiny_fields(inner), **part).to_dict()
        elif name not in DROPPED and (small := shrunk(name, value)) is not value:
            fields[name] = small
    kinds = list(dict.fromkeys(default.to_dict().get("layer_types") or ()))
    if len(kinds) > 1 or (kinds and kinds != ["full_attention"]):
        count = max(2, len(kinds))
        fields["layer_types"] = (kinds * count)[:count]
        fields["num_hidden_layers"] = count
    return fields


def shrunk(name: str, value: Any) -> Any:
    """Return a smaller value of a field, or the value itself where nothing is known."""
    if isinstance(value, bool):
        return value
    if name.endswith("token_id"):
        return value if value is None else (value if isinstance(value, list) else small_id(name))
    if name.endswith("vocab_size") and isinstance(value, int):
        return VOCABULARY
    if isinstance(value, float) and ("drop" in name):
        return 0.0
    if isinstance(value, int) and name in SIZES:
        return min(value, SIZES[name])
    return value


def small_id(name: str) -> int:
    """Return a token id within the vocabulary."""
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}.get(name, 2)


def build(model_class: Any, config: PreTrainedConfig) -> Any:
    """Return a model in evaluation mode, its linear maps and embeddings large enough for attention to matter."""
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class._from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters, as its default config has sizes that no rule makes small")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ in LARGE:
                module.weight.normal_(0, 0.2)
    return model
