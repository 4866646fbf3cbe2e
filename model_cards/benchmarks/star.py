"""Time and memory of a Star-Transformer compared with an LSTM and a dense Transformer.

Encoders of equal width and depth, which take turns: `star`, ours; `dense`, transformers' BERT on torch's SDPA; `lstm`,
torch's LSTM in both directions, each half as wide. A star has no MLP. A training step is a forward and a backward pass.
Times are in milliseconds, memory is in MiB, lengths are in tokens:
    python model_cards/benchmarks/star.py --lengths 64 512 2048 --threads 1
"""

from encoders import DENSE, LSTM, STAR, contest

CONTEST = contest(
    __file__,
    "Star-Transformer",
    {
        STAR: "our StarTransformerModel, an update of tokens and relay for each layer, without MLPs",
        DENSE: "transformers' BERT on torch's SDPA, with MLPs four times as wide",
        LSTM: "torch's LSTM in both directions, each half as wide",
    },
    (64, 128, 256, 512, 1024, 2048),
    batch_size=(8, "texts"),
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
