"""The Reformer of transformers, converted, against itself: the same rotations, texts of several chunks, float64."""

from typing import Any

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.models.efficient_reformer.attention import LSHAttention

SIZES: dict[str, Any] = {
    "attn_layers": ["local", "lsh", "lsh"],
    "hidden_size": 32,
    "attention_head_size": 8,
    "num_attention_heads": 2,
    "feed_forward_size": 24,
    "axial_pos_shape": (8, 8),
    "axial_pos_embds_dim": (8, 24),
    "max_position_embeddings": 64,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 8,
    "num_buckets": [2, 4],
    "num_hashes": 3,
    "vocab_size": 61,
    "hash_seed": 5,
    "initializer_range": 0.2,
}
HEADS = {
    "ModelWithLMHead": {"is_decoder": True},
    "ForMaskedLM": {"num_buckets": 6, "num_hashes": 1},
    "ForSequenceClassification": {"axial_pos_embds": False},
    "ForQuestionAnswering": {"local_num_chunks_before": 2, "local_num_chunks_after": 1, "lsh_num_chunks_after": 1},
    "Model": {"is_decoder": True, "attn_layers": ["lsh", "lsh"]},
}


def source(head: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.ReformerConfig(**{**SIZES, **HEADS[head], **fields})
    return getattr(transformers, f"Reformer{head}")(config).double().eval()


def their_rotations(layer: LSHAttention, *_: Any) -> torch.Tensor:
    """Return what transformers draws with its `hash_seed`, in every layer the same."""
    config = layer.config
    torch.manual_seed(config.hash_seed)
    shape = (config.num_attention_heads, layer.head_dim, config.num_hashes, sum(layer.factors) // 2)
    return torch.randn(shape, dtype=torch.float64)


# in encoders there, the first chunk reads padding instead of the last tokens if a whole chunk of padding is appended
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", [48, 46, 3])
# of the bias of the vocabulary, and of the rotations, which differ
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_outputs_are_equal(head: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = source(head)
    ours = hea.convert(theirs)
    monkeypatch.setattr(LSHAttention, "rotations", their_rotations)
    ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = theirs(ids), ours(ids)
    name = next(name for name in ("logits", "start_logits", "last_hidden_state") if name in expected)
    torch.testing.assert_close(actual[name], expected[name], atol=1e-10, rtol=1e-8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_there_and_back() -> None:
    theirs = source("ModelWithLMHead")
    again = hea.convert(hea.convert(theirs), to="reformer")
    assert type(again) is type(theirs)
    # None stands for the dropout of hidden states there
    same = ("architectures", "classifier_dropout", "dtype")
    ours = {name: value for name, value in theirs.config.to_dict().items() if name not in same}
    found = again.config.to_dict()
    assert {name: found[name] for name in ours if found[name] != ours[name]} == {}
    for name, weight in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_defects_there_are_none_here() -> None:
    """The bias of the vocabulary acts; training takes any length, and is repeated by the same seed."""
    theirs = source("ModelWithLMHead", hash_seed=None)
    with torch.no_grad():
        theirs.lm_head.bias.fill_(3.0)
    ours = hea.convert(theirs)
    ids = torch.randint(3, 61, (2, 43), generator=torch.Generator().manual_seed(1))
    ours.train()
    with pytest.raises(ValueError, match="multiple of"):
        theirs.train()(ids)
    loss = ours(ids, labels=ids).loss
    assert torch.autograd.grad(loss, ours.lm_head.bias)[0].any()
