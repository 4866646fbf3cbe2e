"""Attention of the Routing Transformer by its definition: token by token, cluster by cluster; gradients by autograd."""

from typing import Any

import torch
from torch import Tensor


def on_sphere(states: Tensor) -> Tensor:
    centred = states - states.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def members_of(similarity: Tensor, num_tokens: int) -> list[int]:
    """Return the tokens of the largest similarities [T], in the order of the text; of equals the first."""
    listed = similarity.detach().tolist()
    ranked = sorted(range(len(listed)), key=lambda token: (-listed[token], token))
    return sorted(ranked[:num_tokens])


def weights_of_row(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores).softmax(0)


class DenseRouting:
    """What a `RoutingAttention` in float64 computes for one text, [T, hidden_size] → the same."""

    def __init__(self, module: Any) -> None:
        self.module, self.config = module, module.config

    def __call__(self, hidden_states: Tensor) -> Tensor:
        module, width = self.module, self.module.head_dim
        query = module.q_proj(hidden_states).unflatten(-1, (-1, width)).transpose(0, 1)
        value = module.v_proj(hidden_states).unflatten(-1, (-1, width)).transpose(0, 1)
        key = module.k_proj(hidden_states).unflatten(-1, (-1, width)).transpose(0, 1)
        outs = []
        for head in range(module.num_heads):
            if head >= module.num_routing:
                own_key = key[head - module.num_heads]
                outs.append(self.local(query[head], own_key, value[head]))
                continue
            means = module.centroids.means[head].to(query.dtype)
            routed = on_sphere(query[head])
            if self.config.has_balanced_clusters:
                routed_key = routed if self.config.shares_qk else on_sphere(key[head])
                outs.append(self.balanced(routed, routed_key, value[head], means))
            else:
                outs.append(self.causal(routed, value[head], means))
        return module.o_proj(module.head_map(torch.stack(outs, 1)).flatten(1))

    def score(self, query: Tensor, key: Tensor, distances: Any, distance: int, scale: float) -> Tensor:
        if distances is not None:
            bounded = max(distances.first, min(distances.last, distance))
            key = key + distances.weight[bounded - distances.first]
        return query @ key * scale

    def local(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Read the three tokens before and the own one: `Band(3, 0)`."""
        distances, rows = self.module.local_distances, []
        for row in range(len(query)):
            read = range(max(0, row - 3), row + 1)
            scores = [self.score(query[row], key[each], distances, row - each, self.module.scaling) for each in read]
            rows.append(weights_of_row(scores) @ value[read.start : read.stop])
        return torch.stack(rows)

    def balanced(self, query: Tensor, key: Tensor, value: Tensor, means: Tensor) -> Tensor:
        sums, counts = [torch.zeros_like(value[0]) for _ in value], [0] * len(value)
        for mean in means:
            rows = members_of(query @ mean, self.config.cluster_tokens)
            columns = members_of(key @ mean, self.config.cluster_tokens)
            for place, row in enumerate(rows):
                counts[row] += 1
                read = [(each, column) for each, column in enumerate(columns) if self.may_read(row, column)]
                if read:
                    scores = [self.routed_score(query[row], key[column], place - each) for each, column in read]
                    sums[row] = sums[row] + weights_of_row(scores) @ value[[column for _, column in read]]
        return torch.stack([total / (count + 1e-2) for total, count in zip(sums, counts, strict=True)])

    def causal(self, query: Tensor, value: Tensor, means: Tensor) -> Tensor:
        clusters, rows = (query @ means.T).argmax(-1).tolist(), []
        for row, cluster in enumerate(clusters):
            members = [each for each in range(row + 1) if clusters[each] == cluster][-self.config.cluster_tokens :]
            read = [(len(members) - 1 - each, column) for each, column in enumerate(members)]
            read = [(distance, column) for distance, column in read if self.may_read(row, column)]
            if not read:
                rows.append(torch.zeros_like(value[0]))
                continue
            scores = [self.routed_score(query[row], query[column], distance) for distance, column in read]
            rows.append(weights_of_row(scores) @ value[[column for _, column in read]])
        return torch.stack(rows)

    def routed_score(self, query: Tensor, key: Tensor, distance: int) -> Tensor:
        return self.score(query, key, self.module.member_distances, distance, self.config.routing_scale)

    def may_read(self, row: int, column: int) -> bool:
        if not self.config.is_causal:
            return True
        return column <= row if self.config.include_self else column < row
