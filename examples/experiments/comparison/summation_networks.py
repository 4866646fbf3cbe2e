"""What a star is compared with on vectors: torch's dense Transformer and torch's LSTM in both directions."""

from typing import Any

import torch
from torch import Tensor, nn


class Summation(nn.Module):
    """A linear map, a network that makes one vector of a sequence, and a linear map to the sum."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_map = nn.Linear(width + 1, hidden_size)
        self.classifier = nn.Linear(hidden_size, width)

    def summary(self, embedded: Tensor) -> Tensor:
        """Return what represents a sequence, [B, T, hidden_size] → [B, hidden_size]."""
        raise NotImplementedError

    def forward(self, inputs_embeds: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return logits [B, width] and, given labels, the mean squared error."""
        logits = self.classifier(self.summary(self.embedding_map(inputs_embeds)))
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}


class DenseSummation(Summation):
    """A pre-norm Transformer of torch. A learned first token becomes the summary, as a star's relay is one."""

    def __init__(self, width: int, hidden_size: int, num_layers: int, num_heads: int) -> None:
        super().__init__(width, hidden_size)
        self.first = nn.Parameter(0.02 * torch.randn(hidden_size))
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, 2 * hidden_size, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(hidden_size)
        self.layers = nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)

    def summary(self, embedded: Tensor) -> Tensor:
        first = self.first.expand(len(embedded), 1, -1)
        return self.layers(torch.cat((first, embedded), 1))[:, 0]


class LSTMSummation(Summation):
    """One LSTM in each direction, whose last states are the summary."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__(width, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, batch_first=True, bidirectional=True)
        self.joined = nn.Linear(2 * hidden_size, hidden_size)

    def summary(self, embedded: Tensor) -> Tensor:
        _, (last, _) = self.lstm(embedded)
        return self.joined(torch.cat((last[0], last[1]), -1))
