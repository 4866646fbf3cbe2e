"""A tiny Llama with its tokenizer in one file, as llama.cpp reads it."""

from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, MLP = 32, 2, 2, 64
WORDS = ["<|endoftext|>", "<unk>", "a", "b", "c", "ab", "Ġ", "Ġa"]


def write_tiny_llama(file: Path) -> dict[str, np.ndarray]:
    """Write a model of random weights, 32 wide, of 2 layers; return the weights by their names in the file."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(WORDS) - 1)])
    writer.add_token_merges(["a b", "Ġ a"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(0)
    writer.add_unk_token_id(1)
    weights = tiny_weights()
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def tiny_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(WORDS), WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (8, WIDTH)}
    for layer in range(LAYERS):
        own = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
        own |= {"ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH), "ffn_down": (WIDTH, MLP)}
        own |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
