"""The global input of an ETC: global tokens and the long tokens that belong to them, labels, and contrastive loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.unsupported import check_mask_values
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import is_exporting
from hf_efficient_attn.layout.transfer import derived, on_host
from hf_efficient_attn.models.inputs import Movable, check_integers
from hf_efficient_attn.models.prologue import PreparedCall, prepare_call

# Relative labels of ETC: the label of a pair is the index of its vector and its bias in the tables.
#
# The order is that of the authors' tables. With k the largest distance, label 0 is the token itself, 1 … k are tokens
# to the right of the query, k + 1 … 2k tokens to the left, and then come the three kinds of pairs with a global token.
# Distances beyond k share the last label of their side. Source: Ainslie et al. (arXiv:2004.08483), section 3; the
# authors' code.


# rows of a table after those of the distances: a long token and a global token that it does not belong to; one that it
# belongs to; two global tokens of different contexts
NOT_LINKED, LINKED, OTHER_CONTEXT = 1, 2, 3
NUM_KINDS = 3


def num_labels(max_distance: int) -> int:
    """Return how many labels there are: 2k + 1 distances, and three kinds of pairs with a global token."""
    return 2 * max_distance + 1 + NUM_KINDS


def labels_of_offsets(offsets: Tensor, max_distance: int) -> Tensor:
    """Return the labels of offsets key − query.

    >>> labels_of_offsets(torch.arange(-5, 6), 3).tolist()
    [6, 6, 6, 5, 4, 0, 1, 2, 3, 3, 3]
    """
    near = offsets.abs().clamp(max=max_distance)
    return torch.where(offsets < 0, max_distance + near, near)


def labels_by_distance(max_distance: int) -> list[int]:
    """Return the labels in the order of `Distance(-k, k)`, which counts query − key from −k to k.

    >>> labels_by_distance(2)
    [2, 1, 0, 3, 4]
    """
    return [*range(max_distance, -1, -1), *range(max_distance + 1, 2 * max_distance + 1)]


# The global tokens of a text, the long tokens that belong to them, and the allowed pairs, found once for all layers.
#
# Shapes: B rows, T long tokens, G global tokens, K levels of links.


# default of `spare_chunks`, the extra global tokens of packed rows: LEAST_SPARE, and one for every CHUNKS_PER_SPARE
# chunks
LEAST_SPARE, CHUNKS_PER_SPARE = 8, 4
TOO_MANY = (
    "A row of packed documents has more chunks than the compiled model has global tokens. Set spare_chunks to the "
    "largest number of documents in a row, or do not compile the model."
)


@dataclass(frozen=True)
class GlobalInput:
    """The global tokens of a batch, given in the call or one for each chunk of the text.

    Attributes:
        real: which global tokens are not padding, bool [B, G].
        links: the indices of the global tokens that each long token belongs to, int [B, T, K]; −1: none.
        documents: the number of each global token's packed document, [B, G]; None: every row is one document.
        contexts: the number of each global token's context, [B, G]; global tokens of different contexts have no order.
            None: all are in one order.
        attends_to_all: which global tokens attend to every long token whatever `hard_global_to_long` says, bool [B, G];
            None: none.
    """

    real: Tensor
    links: Tensor
    documents: Tensor | None = None
    contexts: Tensor | None = None
    attends_to_all: Tensor | None = None


@dataclass(frozen=True)
class Structure(Movable):
    """The allowed pairs with a global token, and their labels.

    Attributes:
        long_to_global: which global tokens a long token attends to, bool [B, 1, T, G].
        from_global: which global tokens and then which long tokens a global token attends to, bool [B, 1, G, G + T].
        linked: whether a long token belongs to a global token, bool [B, 1, T, G].
        labels: labels of the pairs of global tokens, int [B or 1, 1, G, G]; None: the model has no labels.
    """

    long_to_global: Tensor
    from_global: Tensor
    linked: Tensor
    labels: Tensor | None


def find_chunks(config: Any, states: Tensor, real: Tensor | None, documents: Tensor | None) -> GlobalInput:
    """Return one global token for every chunk of `chunk_tokens` real tokens; each document begins a chunk.

    Args:
        states: [B, T, X]; only the shape and the device are used.
        real: which tokens are not padding, bool [B, T]; None: all.
        documents: the number of each token's packed document, [B, T]; None: every row is one document.
    """
    batch_size, tokens = states.shape[:2]
    chunk_tokens = config.chunk_tokens
    num_global = (tokens + chunk_tokens - 1) // chunk_tokens
    if is_exporting():
        # an exported program cannot have a quotient of a dynamic length as a size
        torch._check(tokens <= config.max_position_embeddings)
        num_global = -(-config.max_position_embeddings // chunk_tokens)
    if documents is not None:
        spare = config.spare_chunks
        spare = LEAST_SPARE + num_global // CHUNKS_PER_SPARE if spare is None else spare
        return _packed_chunks(real, documents, chunk_tokens, num_global + spare)
    numbers = torch.arange(num_global, device=states.device).unsqueeze(0)
    if real is None:
        index = torch.arange(tokens, device=states.device)
        links = (index // chunk_tokens).expand(batch_size, -1)
        return GlobalInput((numbers * chunk_tokens < tokens).expand(batch_size, -1), links.unsqueeze(-1))
    place = real.long().cumsum(1) - 1
    links = torch.where(real, place // chunk_tokens, -1)
    return GlobalInput(numbers * chunk_tokens < real.sum(1, keepdim=True), links.unsqueeze(-1))


def _packed_chunks(real: Tensor | None, documents: Tensor, chunk_tokens: int, num_global: int) -> GlobalInput:
    starts = derived(chunk_starts, real, documents, chunk_tokens)
    known = torch.ones_like(starts) if real is None else real
    if is_tracing(starts):
        # while tracing, sizes cannot depend on the values of positions
        torch._assert_async((starts.sum(1) <= num_global).all(), TOO_MANY)
    else:
        num_global = max(num_global, int(on_host(starts).sum(1).max()) if len(starts) else 0)
    links = torch.where(known, starts.long().cumsum(1) - 1, num_global).clamp(max=num_global)
    # the last column collects masked tokens
    owners = documents.new_full((documents.shape[0], num_global + 1), -1).scatter(1, links, documents)[:, :-1]
    return GlobalInput(owners >= 0, links.where(known, -1).unsqueeze(-1), owners)


def chunk_starts(real: Tensor | None, documents: Tensor, chunk_tokens: int) -> Tensor:
    """Return which tokens are the first token of a chunk, bool [B, T].

    >>> chunk_starts(None, torch.tensor([[0, 0, 0, 1, 1]]), 2).int().tolist()
    [[1, 0, 1, 1, 0]]
    """
    documents = documents.long()
    known = torch.ones_like(documents, dtype=torch.bool) if real is None else real
    rank, last = known.long().cumsum(1) - 1, documents.shape[1]
    first = torch.full_like(documents, last).scatter_reduce(1, documents, torch.where(known, rank, last), "amin")
    return known & ((rank - first.gather(1, documents)) % chunk_tokens == 0)


def build_structure(config: Any, tokens: GlobalInput, real: Tensor | None, documents: Tensor | None) -> Structure:
    """Return the allowed pairs and labels of a batch.

    Args:
        real, documents: padding and documents of the long tokens, as in `find_chunks`.
    """
    num_global = tokens.real.shape[1]
    numbers = torch.arange(num_global, device=tokens.real.device)
    linked = (tokens.links.unsqueeze(2) == numbers.view(-1, 1)).any(-1) & tokens.real.unsqueeze(1)
    pairs = tokens.real.unsqueeze(1).expand(-1, tokens.links.shape[1], -1)
    if real is not None:
        pairs = pairs & real.unsqueeze(-1)
    among = tokens.real.unsqueeze(1) & tokens.real.unsqueeze(2)
    if documents is not None:
        pairs = pairs & (documents.unsqueeze(2) == tokens.documents.unsqueeze(1))
        among = among & (tokens.documents.unsqueeze(2) == tokens.documents.unsqueeze(1))
    read = linked if tokens.attends_to_all is None else linked | tokens.attends_to_all.unsqueeze(1)
    to_global = pairs & linked if config.hard_long_to_global else pairs
    to_long = (pairs & read if config.hard_global_to_long else pairs).transpose(1, 2)
    return Structure(
        # layers save these tables for the backward pass, and share the same tensors
        *(each.unsqueeze(1) for each in (to_global, torch.cat((among, to_long), -1), linked)),
        labels=None if config.relative_vocab_size is None else _labels(config, tokens, numbers),
    )


def _labels(config: Any, tokens: GlobalInput, numbers: Tensor) -> Tensor:
    labels = labels_of_offsets(numbers - numbers.unsqueeze(-1), config.max_relative_distance)[None, None]
    if tokens.contexts is None:
        return labels
    other = tokens.contexts.unsqueeze(2) != tokens.contexts.unsqueeze(1)
    return torch.where(other.unsqueeze(1), 2 * config.max_relative_distance + OTHER_CONTEXT, labels)


# inputs of this family only
INPUTS = (
    "global_input_ids",
    "global_mask",
    "long_to_global",
    "global_token_type_ids",
    "global_contexts",
    "global_attends_to_all",
    "long_contexts",
    "cpc_mask",
    "cpc_input_ids",
)
CLOSED = (
    "This attention_mask masks pairs of real tokens, but global tokens pass information from every token to all "
    "others. Pass a padding mask [batch, tokens]; for packed documents, pass position_ids that restart."
)


def find_globals(
    config: Any,
    call: PreparedCall,
    real: Tensor | None,
    ids: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
    contexts: Tensor | None,
    attends_to_all: Tensor | None,
    types: Tensor | None,
) -> tuple[Tensor, GlobalInput]:
    """Return the ids of the global tokens, [B, G], and what a call says about them.

    Args:
        real: which long tokens are not padding, bool [B, T]; None: all.
        ids, mask, links, contexts, attends_to_all, types: the call's `global_input_ids`, `global_mask`,
            `long_to_global`, `global_contexts`, `global_attends_to_all` and `global_token_type_ids`.

    Raises:
        InputError: some of them without `global_input_ids`, with a wrong shape, or with packed documents.
    """
    given = {"global_mask": mask, "global_contexts": contexts, "global_attends_to_all": attends_to_all}
    if ids is None:
        others = {"long_to_global": links, "global_token_type_ids": types}
        named = [name for name, each in {**given, **others}.items() if each is not None]
        if named:
            raise InputError(
                f"{', '.join(named)} given without global_input_ids, the tokens that they describe. Pass "
                "global_input_ids as well."
            )
        chunks = find_chunks(config, call.embedded, real, call.documents)
        return torch.full(chunks.real.shape, config.global_token_id, device=chunks.real.device), chunks
    if call.documents is not None:
        raise InputError(
            "position_ids restart, so rows hold packed documents, which have one global token for each chunk of "
            f"chunk_tokens={config.chunk_tokens} tokens. Leave global_input_ids out, or pass each document in its own "
            "row."
        )
    if ids.ndim != 2 or ids.shape[0] != call.batch_size or ids.shape[1] == 0:
        raise InputError(
            f"global_input_ids has shape {list(ids.shape)}; it must be [batch, global tokens] with {call.batch_size} "
            "rows of at least one token. Leave it out to get one global token for each chunk."
        )
    shape = tuple(ids.shape)
    for name, each in given.items():
        if each is not None and tuple(each.shape) != shape:
            raise InputError(f"{name} has shape {list(each.shape)}; it must be [batch, global tokens] = {list(shape)}.")
    for name in ("global_mask", "global_attends_to_all"):
        check_mask_values(given[name], name)
    return ids, GlobalInput(
        real=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0,
        links=_of_real(checked_links(links, call, shape[1]), real),
        contexts=contexts,
        attends_to_all=None if attends_to_all is None else attends_to_all != 0,
    )


def _of_real(links: Tensor, real: Tensor | None) -> Tensor:
    """Return the links [B, T, K], with -1 for padding, which belongs to no global token."""
    return links if real is None else torch.where(real.unsqueeze(-1), links, -1)


def checked_links(links: Tensor | None, call: PreparedCall, num_global: int) -> Tensor:
    """Return the indices of the global tokens that each long token belongs to, [B, T, K].

    Raises:
        InputError: a wrong shape or dtype, or an index without a global token.
    """
    batch_size, tokens = call.batch_size, call.tokens
    if links is None:
        return torch.full((batch_size, tokens, 1), -1, device=call.embedded.device)
    if links.is_floating_point() or links.is_complex():
        raise InputError(f"long_to_global has dtype {links.dtype}; it must hold indices of global tokens, as integers.")
    if links.ndim not in (2, 3) or tuple(links.shape[:2]) != (batch_size, tokens):
        raise InputError(
            f"long_to_global has shape {list(links.shape)}; it must be [batch, tokens] = [{batch_size}, {tokens}], "
            "with a third axis if a token belongs to several global tokens."
        )
    if not is_tracing(links):
        least, most = (int(each) for each in on_host(links).aminmax())
        if least < -1 or most >= num_global:
            raise InputError(
                f"long_to_global holds {most if most >= num_global else least}; it must hold indices of the "
                f"{num_global} global tokens, 0 to {num_global - 1}, or -1 for a token that belongs to none."
            )
    return links if links.ndim == 3 else links.unsqueeze(-1)


def cut_at_contexts(mask: TokenMask, contexts: Tensor | None, call: PreparedCall) -> TokenMask:
    """Return the token mask of the long tokens, in which every context of a row is a separate document.

    Args:
        mask: token mask of all long tokens.
        contexts: the call's `long_contexts`, [B, T]; None: long tokens attend across contexts.
        call: the call with all long tokens.

    Raises:
        InputError: a wrong shape, or values that are not integers.
    """
    if contexts is None:
        return mask
    check_integers("long_contexts", contexts, "contexts")
    shape = (call.batch_size, call.tokens)
    if tuple(contexts.shape) != shape:
        raise InputError(
            f"long_contexts has shape {list(contexts.shape)}; it must be [batch, tokens] = {list(shape)}, with the "
            "context number of each long token. Leave it out if long tokens attend across contexts."
        )
    return replace(mask, segment_ids=derived(_segments, contexts, mask.key_mask, mask.segment_ids))


def _segments(contexts: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    """Return contexts numbered in the order of their row, [B, T]; a masked token is in the context before it."""
    if real is not None:
        # contexts of the real tokens, without gaps; the last column collects masked tokens
        rank = real.long().cumsum(1) - 1
        found = pad(contexts, (0, 1)).scatter(1, torch.where(real, rank, contexts.shape[1]), contexts)
        contexts = found.gather(1, rank.clamp(min=0))
    starts = contexts[:, 1:] != contexts[:, :-1]
    if documents is not None:
        starts = starts | (documents[:, 1:] != documents[:, :-1])
    return pad(starts.long().cumsum(1), (1, 0))


# Contrastive predictive coding: the global state of a masked sentence should match its state when it is not masked.
#
# The sentences selected by `cpc_mask` are masked in the text, so their global tokens must predict them from their
# surroundings. Each sentence is then encoded alone with its global token, and among all these states of the batch, the
# global state of a masked sentence should be closest to that of the same sentence. Sources: Ainslie et al.
# (arXiv:2004.08483), section 4; van den Oord et al. (arXiv:1807.03748). The authors did not publish their code for
# this. Here the score is the product of two states divided by the root of their width.


Types = tuple[Tensor | None, Tensor | None]
# options that record outputs of every layer
RECORDED = (
    "output_hidden_states",
    "output_attentions",
    "output_global_hidden_states",
    "output_global_attentions",
)


def contrastive_loss(
    model: Any,
    states: Tensor,
    global_ids: Tensor,
    globals_: GlobalInput,
    types: Types,
    chosen: Tensor,
    input_ids: Tensor | None,
    segment_ids: Tensor | None,
) -> Tensor:
    """Return the weighted contrastive loss over the masked sentences of a batch; 0 if there are none.

    Args:
        model: the backbone.
        states: global states for the masked text, [B, G, hidden_size].
        global_ids: the ids of the global tokens, [B, G].
        types: token types of the long and of the global tokens, or None.
        chosen: which global tokens stand for masked sentences, [B, G].
        input_ids: the long tokens before they were masked, [B, T].
        segment_ids: segments of the long tokens, which attend only within their segment, [B, T]; None: no segments.

    Raises:
        InputError: a model without this loss, or inputs that are missing or have a wrong shape.
    """
    weight = model.config.cpc_loss_weight
    _check(weight, states, globals_, chosen, input_ids)
    rows, numbers = torch.nonzero((chosen != 0) & globals_.real, as_tuple=True)
    if len(rows) == 0:
        return 0 * states.sum()
    alone = encode_alone(model, global_ids, globals_, types, input_ids, segment_ids, rows, numbers)
    own = states[rows, numbers]
    wide = torch.promote_types(states.dtype, torch.float32)
    scores = own.to(wide) @ alone.to(wide).T * states.shape[2] ** -0.5
    return weight * nn.functional.cross_entropy(scores, torch.arange(len(rows), device=scores.device))


def refuse_recording(config: Any, options: Mapping[str, Any]) -> None:
    """Raise InputError if outputs of layers would be recorded, because layers run twice: for texts and sentences."""
    for name in RECORDED:
        if options.get(name, getattr(config, name, False)):
            raise InputError(
                f"{name}=True with cpc_mask: the layers then run a second time, on the masked sentences, and the "
                f"outputs of both runs would be recorded. Set {name}=True only in calls without cpc_mask."
            )


def encode_alone(
    model: Any,
    global_ids: Tensor,
    globals_: GlobalInput,
    types: Types,
    input_ids: Any,
    segment_ids: Tensor | None,
    rows: Tensor,
    numbers: Tensor,
) -> Tensor:
    """Return the global states of sentences that are each encoded alone, [sentences, hidden_size].

    rows, numbers: row and index of the global token of each sentence, [sentences].
    """
    inside = (globals_.links[rows] == numbers[:, None, None]).any(-1)
    width = max(1, int(inside.sum(1).max()))
    order = inside.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    real = inside.gather(1, order)
    call = prepare_call(model.config, model.embed_tokens(input_ids[rows].gather(1, order)), None, None, None, {})
    one = torch.ones_like(numbers, dtype=torch.bool).unsqueeze(1)
    single = GlobalInput(one, torch.where(real, 0, -1).unsqueeze(-1))
    ids = global_ids[rows, numbers].unsqueeze(1)
    own_types = (
        None if types[0] is None else types[0][rows].gather(1, order),
        None if types[1] is None else types[1][rows, numbers].unsqueeze(1),
    )
    mask = TokenMask(real, None if segment_ids is None else segment_ids[rows].gather(1, order))
    _, states = model.encode(call, ids, single, own_types, mask, {"output_attentions": False})
    first: Tensor = states[:, 0]
    return first


def _check(weight: float, states: Tensor, globals_: GlobalInput, chosen: Tensor, input_ids: Tensor | None) -> None:
    if weight == 0:
        raise InputError(
            "cpc_mask is given, but cpc_loss_weight=0: the model has no CPC loss. Build it with cpc_loss_weight=0.25, "
            "the authors' weight."
        )
    shape, tokens = tuple(states.shape[:2]), tuple(globals_.links.shape[:2])
    if tuple(chosen.shape) != shape:
        raise InputError(f"cpc_mask has shape {list(chosen.shape)}; it must be [batch, global tokens] = {list(shape)}.")
    if input_ids is None or tuple(input_ids.shape) != tokens:
        given = None if input_ids is None else list(input_ids.shape)
        raise InputError(
            f"cpc_input_ids has shape {given}; with cpc_mask it must hold the tokens before masking, [batch, tokens] = "
            f"{list(tokens)}."
        )
