"""Many threads, shared models, inputs of one length and different padding: every output must be that of one thread.

python tests/thread_stress.py --forwards 10000
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import seq2seq_cases
from attention_models import PATTERN, build
from models_cases import TINY, randomize

from hf_efficient_attn import SparseSeq2SeqConfig, SparseTransformerConfig, sparsify
from hf_efficient_attn.models.sparse_seq2seq import SparseSeq2SeqModel
from hf_efficient_attn.models.sparse_transformer import SparseTransformerModel

NUM_EXAMPLES, TOKENS, THREADS = 8, 24, 4
Forward = Callable[[int], Tensor]


def masks() -> Tensor:
    """Return masks [examples, 2, tokens], each with other padding, on either side."""
    masks = torch.ones(NUM_EXAMPLES, 2, TOKENS, dtype=torch.long)
    for example in range(1, NUM_EXAMPLES):
        if example % 2:
            masks[example, 0, :example] = 0
        else:
            masks[example, 1, -example:] = 0
    return masks


def forwards() -> dict[str, Forward]:
    """Return by the name of a model what it computes of the example of a number."""
    llama = sparsify(build("llama"), PATTERN)
    torch.manual_seed(0)
    longformer = randomize(SparseTransformerModel(SparseTransformerConfig.longformer(**TINY)).eval())
    led = randomize(SparseSeq2SeqModel(SparseSeq2SeqConfig.led(**seq2seq_cases.TINY)).eval())
    ids, mask = torch.randint(3, 60, (NUM_EXAMPLES, 2, TOKENS)), masks()
    # global tokens at another place in every example
    chosen = torch.arange(TOKENS)[None, None] == (TOKENS // 2 - torch.arange(NUM_EXAMPLES) // 2)[:, None, None]
    chosen = chosen.expand(-1, 2, -1).long()
    return {
        "llama": lambda i: llama(ids[i], attention_mask=mask[i]).logits,
        "longformer": lambda i: (
            longformer(ids[i], attention_mask=mask[i], global_attention_mask=chosen[i]).last_hidden_state
        ),
        "led": lambda i: led(ids[i], attention_mask=mask[i], decoder_input_ids=ids[i, :, :5]).last_hidden_state,
    }


def count_wrong(num_forwards: int, threads: int = THREADS, seed: int = 0) -> int:
    """Return how many of the forwards of all threads together differ in any bit from those of a single thread.

    Every second one runs under inference mode, the others under no_grad.
    """
    every = forwards()
    with torch.no_grad():
        expected = {name: [forward(i) for i in range(NUM_EXAMPLES)] for name, forward in every.items()}
    draw = random.Random(seed)
    asked = [(draw.choice(sorted(every)), draw.randrange(NUM_EXAMPLES)) for _ in range(num_forwards)]

    def is_wrong(number: int) -> bool:
        name, example = asked[number]
        with torch.inference_mode() if number % 2 else torch.no_grad():
            return not torch.equal(every[name](example), expected[name][example])

    switching = sys.getswitchinterval()
    # threads take turns a thousand times as often as they would
    sys.setswitchinterval(5e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(is_wrong, range(num_forwards)))
    finally:
        sys.setswitchinterval(switching)


def main() -> None:
    """Print how many forwards were wrong; exit with 1 if any was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forwards", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    wrong = count_wrong(args.forwards, args.threads, args.seed)
    seconds = time.perf_counter() - start
    print(f"{wrong} of {args.forwards} forwards wrong, {args.threads} threads, {seconds:.0f} s")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
