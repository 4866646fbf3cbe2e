"""What a choice of keys lets a query read, in words, for explanations."""

from hf_efficient_attn.layout.grouped_keys import ChunkedOrder, KeyGroups
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.selected_keys import MEAN, ChosenKeys


def choice_in_words(chosen: ChosenKeys) -> str:
    """Return the most that a query reads, by the shapes of the choice.

    >>> import torch
    >>> choice_in_words(ChosenBlocks(torch.zeros(1, 1, 4, 3, dtype=torch.int32), block_tokens=512))
    'up to 3 blocks of 512 keys for every query'
    """
    match chosen:
        case ChosenTokens(tokens=tokens):
            return f"up to {tokens.shape[3]:,} keys for every query"
        case ChosenBlocks(blocks=blocks, block_tokens=size, queries_per_choice=shared):
            query = "query" if shared == 1 else f"{shared:,} queries"
            return f"up to {blocks.shape[3]:,} blocks of {size:,} keys for every {query}"
        case KeyGroups(queries=queries, keys=keys):
            joined = "; a query has the mean of its groups" if chosen.join == MEAN else ""
            _, heads, groups, most = queries.shape
            return (
                f"{groups:,} groups in each of {heads:,} heads, of up to {most:,} queries that read up to "
                f"{keys.shape[3]:,} keys{joined}"
            )
        case ChunkedOrder(order=order, chunk_tokens=size, chunks_before=before, chunks_after=after):
            rounds = "an order" if order.shape[2] == 1 else f"{order.shape[2]:,} orders"
            return (
                f"{rounds} of the tokens in chunks of {size:,}, which read themselves, {before:,} before and {after:,} "
                "after"
            )
    return chosen.kind
