"""Contrastive predictive coding: the global state of a masked sentence should be the one that it has when it is read.

The sentences that `cpc_mask` names are masked in the text, and their global tokens must guess them from what surrounds
them. Each is then encoded alone, with its global token, which reads nothing else; and of all sentences of the batch,
the state of a masked one should be most like that of itself. Sources: Ainslie et al. (arXiv:2004.08483), section 4;
van den Oord et al. (arXiv:1807.03748). The authors' code of it is not published: the score is the product of two states
over the root of their width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.prologue import prepare_call

from .structure import GlobalInput

Types = tuple[Tensor | None, Tensor | None]
# what a call may ask for of every layer
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
    """Return the loss over the sentences of a batch, weighted; 0 if there are none.

    Args:
        model: the backbone.
        states: of the global tokens that read the masked text, [B, G, hidden_size].
        global_ids: the global tokens themselves, [B, G].
        types: token types of long and of global tokens, or None.
        chosen: which global tokens stand for masked sentences, [B, G].
        input_ids: the long tokens before they were masked, [B, T].
        segment_ids: of the long tokens, outside of which they read no long token, [B, T]; None: there are none.

    Raises:
        InputError: a model without this loss, or inputs that are missing or of another shape.
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
    """Raise InputError if states or weights of layers are asked for, which run twice: over texts and over sentences."""
    for name in RECORDED:
        if options.get(name, getattr(config, name, False)):
            raise InputError(
                f"{name}=True beside cpc_mask: layers also read the masked sentences alone, and what is recorded of "
                "them would be of both. Ask for it in a call without cpc_mask."
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
    """Return the global states of sentences that are encoded one by one, [sentences, hidden_size].

    rows, numbers: of the global tokens that stand for them, [sentences].
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
            "cpc_mask is given, but cpc_loss_weight=0: the model has no such loss. Build it with cpc_loss_weight=0.25, "
            "which is the authors' share."
        )
    shape, tokens = tuple(states.shape[:2]), tuple(globals_.links.shape[:2])
    if tuple(chosen.shape) != shape:
        raise InputError(f"cpc_mask has shape {list(chosen.shape)}; it must be [batch, global tokens] = {list(shape)}.")
    if input_ids is None or tuple(input_ids.shape) != tokens:
        given = None if input_ids is None else list(input_ids.shape)
        raise InputError(
            f"cpc_input_ids has shape {given}; beside cpc_mask it must be [batch, tokens] = {list(tokens)}: the tokens "
            "of the text before they were masked."
        )
