"""The shape of the models that are compared, the same for all of a run."""

from dataclasses import dataclass

from transformers.hf_argparser import HfArg


@dataclass
class Shape:
    """Arguments that several experiments have; each experiment has its own defaults."""

    hidden_size: int = HfArg(default=64, help="Width; MLPs are four times as wide.")
    num_hidden_layers: int = HfArg(default=2, help="Layers.")
    num_attention_heads: int = HfArg(default=4, help="Heads.")

    def shape(self) -> dict[str, int]:
        """Return the shape as fields of a config."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
        }
