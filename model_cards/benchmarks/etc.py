"""Time and memory of an ETC compared with a dense Transformer.

Encoders of equal width and depth, which take turns: `etc`, ours, with a global token for every chunk of the text;
`dense`, transformers' BERT on torch's SDPA. A training step is a forward and a backward pass. Times are in
milliseconds, memory is in MiB, lengths are in long tokens:
    python model_cards/benchmarks/etc.py --lengths 512 2048 8192 --threads 1
"""

from encoders import DENSE, ETC, contest

CONTEST = contest(
    __file__,
    "ETC",
    {
        ETC: "our EtcTransformerModel, with MLPs four times as wide; a long token attends to {local_radius} on each "
        "side and to all global tokens, one for {chunk_tokens} long ones",
        DENSE: "transformers' BERT on torch's SDPA, with MLPs four times as wide",
    },
    (512, 1024, 2048, 4096, 8192, 16384),
    local_radius=(84, "long tokens that a long token attends to on each side"),
    chunk_tokens=(32, "long tokens for each global token"),
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
