"""Attention of other people's packages in float64, with their weights: outputs and gradients."""

from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize

import hf_efficient_attn as hea
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.compressed_transformer.mechanism import PassedStates
from hf_efficient_attn.models.efficient_reformer.hashing import LSHRule, chunk_order, hash_vectors
from hf_efficient_attn.models.routing_transformer.clusters import balanced_groups
from hf_efficient_attn.models.sparse.inputs import SparseInputs
from hf_efficient_attn.patterns import Band, Causal, Full

HEADS, DIM, WIDTH = 4, 8, 32
# the second text is padded
REAL = torch.arange(9) < torch.tensor([[9], [6]])


def text(tokens: int = 9) -> Tensor:
    return torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def attentions(mechanism: str, **fields: Any) -> list[Any]:
    """Return the attention of each layer of a tiny model, whose maps have no bias but that of the output."""
    model = build("AutoModel", mechanism=mechanism, **{"attention_bias": False, **fields})
    return [layer.self_attn for layer in model.double().layers]


def check_equal(found: Tensor, expected: Tensor, own: list[Tensor], theirs: list[Tensor], **options: Any) -> None:
    """Check outputs, and gradients with respect to what is given of ours, and of the package."""
    torch.testing.assert_close(found, expected, **{"atol": 1e-11, "rtol": 1e-9, **options})
    kept = {"materialize_grads": True, "retain_graph": True}
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    slopes = torch.autograd.grad((found * weight).sum(), own, **kept)
    wanted = torch.autograd.grad((expected * weight).sum(), theirs, **kept)
    for slope, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(slope, other.reshape_as(slope), **{"atol": 1e-10, "rtol": 1e-8, **options})


def test_star_of_fastnlp() -> None:
    """One file of the package is read. What the package imports, in versions of 2022, need not be there."""
    found = find_spec("fastNLP")
    if found is None or found.origin is None:
        pytest.skip("fastNLP is not installed: pip install --no-deps FastNLP==1.0.1")
    file = Path(found.origin).parent / "modules" / "torch" / "encoder" / "star_transformer.py"
    spec = spec_from_file_location("star_of_fastnlp", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    config = hea.StarTransformerConfig.fastnlp(vocab_size=61, embedding_dropout=0.0)
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.head_dim)
    theirs = module.StarTransformer(*sizes, dropout=0.0, max_len=config.max_position_embeddings).double()
    ours = hea.StarTransformerModel(config).double()
    modules = [(ours.embeddings.positions.table, theirs.pos_emb)]
    for number, layer in enumerate(ours.layers):
        modules.append((layer.attention_norm, theirs.norm[number]))
        for own, other in ((layer.self_attn, theirs.ring_att[number]), (layer.relay_attn, theirs.star_att[number])):
            names = {"q_proj": "WQ", "k_proj": "WK", "v_proj": "WV", "o_proj": "WO"}
            modules += [(getattr(own, name), getattr(other, letters)) for name, letters in names.items()]
    pairs = [(mine, getattr(other, name)) for own, other in modules for name, mine in own.named_parameters()]
    for mine, other in pairs:
        nn.init.uniform_(mine, 0.5, 1.0) if mine.ndim == 1 else nn.init.normal_(mine, std=0.05)
        with torch.no_grad():
            # theirs of maps are those of convolutions
            other.copy_(mine.view(other.shape))
    embedded = torch.randn(3, 17, config.hidden_size, dtype=torch.float64)
    output = ours(inputs_embeds=embedded)
    nodes, relay = theirs(embedded, torch.ones(3, 17, dtype=torch.bool))
    found = torch.cat([output.last_hidden_state, output.pooler_output[:, None]], 1)
    check_equal(found, torch.cat([nodes, relay[:, None]], 1), *map(list, zip(*pairs, strict=True)))


@pytest.mark.parametrize("tokens", [1, 50, 64])
def test_linformer(tokens: int) -> None:
    """Its matrices belong to a layer, and a text that is shorter takes their first rows."""
    theirs = pytest.importorskip("linformer.linformer").LinformerSelfAttention(WIDTH, 64, k=4, heads=HEADS)
    theirs, ours = theirs.double().eval(), attentions("linformer")[0]
    names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "o_proj"}
    maps = ours.length_maps
    with torch.no_grad():
        for name, own in names.items():
            getattr(ours, own).load_state_dict(getattr(theirs, name).state_dict())
        maps.key_map.copy_(theirs.proj_k.T)
        maps.value_map.copy_(theirs.proj_v.T)
    states = text(tokens)
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = ours.o_proj(ours.attend(states, None, False)[0]), theirs(states)
    check_equal(found, expected, [states, ours.q_proj.weight], [states, theirs.to_q.weight])
    slope, wanted = (
        torch.autograd.grad(found.sum(), maps.key_map)[0],
        torch.autograd.grad(expected.sum(), theirs.proj_k),
    )
    torch.testing.assert_close(slope, wanted[0].T, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [3, 12])
def test_memory_compressed(tokens: int, is_causal: bool) -> None:
    """It has one convolution for keys and values, and divides scores by the root of the width of all heads."""
    package = pytest.importorskip("memory_compressed_attention")
    theirs = package.MemoryCompressedAttention(WIDTH, HEADS, causal=is_causal).double().eval()
    ours = attentions("memory_compressed", compression_null_key=True, is_causal=is_causal)[0]
    ours.scaling = WIDTH**-0.5
    with torch.no_grad():
        for project, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.to_qkv.weight.chunk(3), strict=True):
            project.weight.copy_(weight)
        ours.o_proj.load_state_dict(theirs.to_out.state_dict())
        for conv in (ours.key_conv, ours.value_conv):
            conv.load_state_dict(theirs.compress_fn.conv.state_dict())
        for null in (theirs.null_k, theirs.null_v):
            null.normal_()
        ours.null_key.copy_(theirs.null_k.flatten())
        ours.null_value.copy_(theirs.null_v.flatten())
    states = text(tokens)
    found, expected = ours.o_proj(ours.attend(states, None, False)[0]), theirs(states)
    given = [states, ours.null_key, ours.null_value]
    check_equal(found, expected, given, [states, theirs.null_k, theirs.null_v])


FEATURES: dict[str, dict[str, Any]] = {
    "elu": {"normalizer_epsilon": 1e-14},
    "positive_random": {"feature_map": "positive_random", "num_features": 8},
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("features", FEATURES)
def test_linear_attention(features: str, is_causal: bool) -> None:
    """Its features are others. Its sums are those of any features, so it is given ours, as logarithms."""
    package = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")
    attention = attentions("linear", attention_bias=True, is_causal=is_causal, chunk_tokens=4, **FEATURES[features])[0]
    states = text()
    query, key, value = (attention.heads(each) for each in attention.project(states))
    (queries, _), (keys, exponents) = attention.features(query), attention.features(key)
    queries, keys = queries.log(), keys.log() if exponents is None else keys.log() + exponents.unsqueeze(-1)
    if is_causal:
        # it divides by at least 0.001, and a factor of all keys changes nothing else
        out = package.causal_linear_attn(queries, keys + 10, value, kv_mask=REAL, bucket_size=1)
    else:
        sums = keys.masked_fill(~REAL[:, None, :, None], -torch.inf).logsumexp(-2, keepdim=True)
        out = package.linear_attn(queries + sums, keys, value, kv_mask=REAL) * attention.head_dim**0.5
    given = [states, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    found, expected = attention.attend(states, REAL, False)[0], out.transpose(1, 2).flatten(2)
    check_equal(found[REAL], expected[REAL], given, given)


def of_x_transformers(own: Any, groups: int = HEADS, **options: Any) -> Any:
    """Return attention of x-transformers with the maps of ours.

    Query heads that share keys are neighbours here, and there as far apart as there are heads of keys.
    """
    package = pytest.importorskip("x_transformers")
    options = {"dim_head": DIM, "heads": HEADS, "kv_heads": groups, "causal": own.is_causal, **options}
    # its own softmax is in float32
    theirs = package.Attention(WIDTH, **options, custom_attn_fn=partial(torch.softmax, dim=-1)).double().eval()
    order = torch.arange(WIDTH).view(groups, -1, DIM).transpose(0, 1).flatten()
    with torch.no_grad():
        theirs.to_q.weight.copy_(own.q_proj.weight[order])
        theirs.to_k.weight.copy_(own.k_proj.weight)
        theirs.to_v.weight.copy_(own.v_proj.weight)
        theirs.to_out.weight.copy_(own.o_proj.weight[:, order])
    return theirs


@pytest.mark.parametrize("is_causal", [False, True])
def test_talking_heads(is_causal: bool) -> None:
    """There, what is mixed of scores is added to them, so that P_l is 1 + their map."""
    own = attentions("talking_heads", attention_output_bias=False, is_causal=is_causal)[0]
    theirs = of_x_transformers(own, pre_talking_heads=True, post_talking_heads=True)
    of_scores = theirs.attend.pre_softmax_talking_heads.weight
    of_weights = theirs.attend.post_softmax_talking_heads.weight
    with torch.no_grad():
        of_scores.copy_((own.score_map - torch.eye(HEADS))[..., None, None])
        of_weights.copy_(own.weight_map[..., None, None])
    states = text()
    found, expected = own(states, SparseInputs(TokenMask(REAL)))[0], theirs(states, mask=REAL)
    given = [states, own.k_proj.weight, own.score_map, own.weight_map]
    check_equal(found[REAL], expected[REAL], given, [states, theirs.to_k.weight, of_scores, of_weights])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_residual_scores(is_causal: bool, groups: int) -> None:
    """What the package hands on are scores behind the mask, which is the same in all its layers."""
    fields = {"attention_output_bias": False, "is_causal": is_causal, "num_key_value_heads": groups}
    layers = attentions("residual_scores", **fields)
    theirs = [of_x_transformers(each, groups) for each in layers]
    states, passed, mask = [text(), text()], PassedStates(), SparseInputs(TokenMask(REAL))
    found = [each(own, mask, passed_states=passed)[0] for each, own in zip(layers, states, strict=True)]
    below, scores = theirs[0](states[0], mask=REAL, return_intermediates=True)
    above = theirs[1](states[1], mask=REAL, prev_attn=scores.pre_softmax_attn)
    given = [*states, layers[0].k_proj.weight, layers[1].v_proj.weight]
    their = [*states, theirs[0].to_k.weight, theirs[1].to_v.weight]
    check_equal((found[0] + found[1])[REAL], (below + above)[REAL], given, their)


TOKENS, CLUSTERS, WINDOW, CHUNK = 64, 4, 10, 8
HASHED: dict[str, dict[str, Any]] = {
    "default": {},
    "within buckets": {"attend_across_buckets": False},
    "once": {"allow_duplicate_attention": False},
    "a head each": {"random_rotations_per_head": True, "n_hashes": 1},
}


def heads(count: int) -> list[Tensor]:
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "requires_grad": True}
    return [torch.randn(2, HEADS, TOKENS, DIM, **draw) for _ in range(count)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", HASHED)
@pytest.mark.parametrize("backend", ["reference", "gathered"])
def test_hashing_of_reformer(is_causal: bool, name: str, backend: str) -> None:
    """There, buckets are as long as chunks, and scores are divided by √D although keys have length 1.

    With allow_duplicate_attention=False, the rounds in which a key is read are counted one by one there. A key that
    the first chunk of a round reads in the last chunk of the round before counts 0 times, and its weight is multiplied
    by 1e9. So the tokens of first chunks are not compared.
    """
    options, package = HASHED[name], pytest.importorskip("reformer_pytorch")
    theirs = package.LSHAttention(bucket_size=CHUNK, causal=is_causal, **{"n_hashes": 3, **options}).eval()
    query, value = given = heads(2)
    torch.manual_seed(3)
    expected = theirs(query.flatten(0, 1), value.flatten(0, 1))[0].unflatten(0, (-1, HEADS))
    torch.manual_seed(3)
    sizes = (DIM, theirs.n_hashes, TOKENS // CHUNK // 2)
    # of all heads, or of every head of every example
    rows = len(query) * HEADS if options.get("random_rotations_per_head") else 1
    rotations = torch.randn(rows, *sizes, dtype=torch.float64).expand(len(query) * HEADS, *sizes)
    buckets = hash_vectors(query.detach().flatten(0, 1)[None], rotations, (TOKENS // CHUNK,))
    across, twice = (options.get(each, True) for each in ("attend_across_buckets", "allow_duplicate_attention"))
    told = {"attend_across_buckets": across, "count_duplicates": twice, "chunk_by_bucket": False}
    rule = LSHRule(TOKENS // CHUNK, CHUNK, 1, 0, **told)
    chosen = chunk_order(buckets.view(len(query), HEADS, theirs.n_hashes, TOKENS), rule, None, None)
    pattern = Causal() if is_causal else Full()
    call: dict[str, Any] = {"chosen": chosen, "backend": backend, "scale": DIM**-0.5}
    found = hea.attention(query, normalize(query, dim=-1), value, pattern, **call)
    compared = torch.ones(found.shape[:3], dtype=found.dtype)
    if not twice:
        compared.scatter_(2, chosen.order[..., :CHUNK].flatten(2), 0.0)
        assert 0.5 < compared.mean() < 1
    found, expected = found * compared[..., None], expected * compared[..., None]
    # 1e-9 is added to the counts
    check_equal(found, expected, given, given, **({} if twice else {"atol": 1e-6}))


def routed(vectors: Tensor, **options: Any) -> tuple[Any, Tensor]:
    """Return their attention with random centroids, and the similarity of vectors to these."""
    package = pytest.importorskip("routing_transformer.routing_transformer")
    theirs = package.KmeansAttention(CLUSTERS, WINDOW, HEADS, DIM, **options).double().eval()
    means = torch.randn(HEADS, CLUSTERS, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theirs.kmeans.means.copy_(normalize(means, dim=-1))
    theirs.kmeans.initted.fill_(True)
    return theirs, normalize(vectors.detach(), dim=-1) @ theirs.kmeans.means.transpose(1, 2)


def groups_of(of_queries: Tensor, of_keys: Tensor) -> hea.KeyGroups:
    documents = torch.zeros(1, TOKENS, dtype=torch.long)
    groups = balanced_groups(of_queries, of_keys, documents, TOKENS, WINDOW, is_packed=False)
    return hea.KeyGroups(groups.queries, groups.keys, join="mean", mean_epsilon=1e-5)


@pytest.mark.parametrize("backend", ["reference", "gathered"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_routing(is_causal: bool, backend: str) -> None:
    """In decoders there, the first token of a cluster reads itself, and no other does, as `include_self=False` of ours.

    Decoders there that do not share queries and keys also have a learned key in every cluster, which ours have not.
    """
    if not is_causal:
        query, key, value = given = heads(3)
        theirs, similarity = routed(torch.cat([query, key], 2))
        chosen = groups_of(*similarity.split(TOKENS, 2))
        found = hea.attention(query, key, value, Full(), chosen=chosen, backend=backend)
        check_equal(found, theirs(query, key, value)[0], given, given)
        return
    query, value = given = heads(2)
    theirs, similarity = routed(query, causal=True, shared_qk=True)
    chosen = groups_of(similarity, similarity)
    call: dict[str, Any] = {"chosen": chosen, "backend": backend, "scale": DIM**-0.5}
    found = hea.attention(query, normalize(query, dim=-1), value, Band(None, -1), **call)
    ones = torch.ones(2, HEADS, TOKENS, dtype=torch.float64)
    # how many clusters a token is in, and of how many it is the first
    count, first = (
        torch.zeros_like(ones).scatter_add(2, each.flatten(2), torch.ones_like(each.flatten(2), dtype=torch.float64))
        for each in (chosen.queries, chosen.queries[..., :1])
    )
    check_equal(found + (first / (count + 1e-5))[..., None] * value, theirs(query, query, value)[0], given, given)
