"""Time and memory of a BP-Transformer compared with a dense Transformer.

Encoders of equal width and depth, which take turns: `tree`, ours; `dense`, transformers' BERT on torch's SDPA. A tree
has a span for each token, and its MLPs transform both. A training step is a forward and a backward pass. Times are in
milliseconds, memory is in MiB, lengths are in tokens:
    python model_cards/benchmarks/trees.py --lengths 512 2048 8192 --threads 1
"""

from encoders import DENSE, TREE, contest

CONTEST = contest(
    __file__,
    "BP-Transformer",
    {
        TREE: "our BPTransformerModel, with MLPs four times as wide over tokens and as many spans; a token attends to "
        "{num_nodes} nodes of each size and side",
        DENSE: "transformers' BERT on torch's SDPA, with MLPs four times as wide",
    },
    (512, 1024, 2048, 4096, 8192, 16384),
    num_nodes=(4, "nodes of each size and side that a token of the tree attends to (k)"),
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
