"""Mutate folders of checkpoints, convert them, and see that nothing but errors of this package comes out.

PYTHONPATH=tests python tests/convert/mutated_sources.py --count 3000 --seed 7
"""

import argparse
import json
import random
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from in_tree_models import in_tree

import hf_efficient_attn as hea

HEADS = {
    "bert": "AutoModelForMaskedLM",
    "longformer": "AutoModelForSequenceClassification",
    "bart": "AutoModelForSeq2SeqLM",
    "modernbert": "AutoModel",
}
VALUES: list[Any] = [
    *(None, 0, -1, 3, 7, 1.5, 1e400, -(10**30), True),
    *("", "x", "é\n\0", "kernels-community/flash-attn"),
    *([], ["a"], [3], [[["deep"]]], {}, {"a": 1}, {"rope_type": "x"}),
]
# what a config may have besides its own
OTHER_FIELDS = (
    *("_attn_implementation", "attn_implementation", "attention_pattern", "quantization_config", "torch_dtype"),
    *("auto_map", "base_model_tp_plan", "num_labels", "pruned_heads", "rope_scaling", "sliding_window"),
)
TEXTS = [
    *("null", "[]", "3", '"x"', "{}", "[" * 100_000, '{"weight_map": null}', '{"weight_map": {"a": 3}}'),
    '{"metadata": [], "weight_map": {"a": "../x"}}',
]
DAMAGES = ("cut", "flip", "head", "empty", "folder", "loop", "missing", "text")


def write_sources(folder: Path) -> list[Path]:
    """Write a checkpoint of every form: of four types, ours, in shards, and as a pickle."""
    models = {name: in_tree(name, head) for name, head in HEADS.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    models["bert"].save_pretrained(folder / "shards", max_shard_size="20kB")
    hea.convert(models["bert"], folder / "ours")
    shutil.copytree(folder / "bert", folder / "pickle")
    (folder / "pickle" / "model.safetensors").unlink()
    torch.save(models["bert"].state_dict(), folder / "pickle" / "pytorch_model.bin")
    return sorted(folder.iterdir())


def mutate(folder: Path, choice: random.Random) -> str:
    """Change a field of the config, or damage a file, and return what was done."""
    if choice.random() < 0.5:
        return mutate_config(folder / "config.json", choice)
    return damage(choice.choice(sorted(folder.iterdir())), choice.choice(DAMAGES), choice)


def mutate_config(file: Path, choice: random.Random) -> str:
    config = json.loads(file.read_text())
    name, value = choice.choice([*config, *OTHER_FIELDS]), choice.choice(VALUES)
    file.write_text(json.dumps({**config, name: value}))
    return f"{name}={value!r}"


def damage(file: Path, how: str, choice: random.Random) -> str:
    content = bytearray(file.read_bytes())
    if how == "flip":
        for _ in range(3):
            content[choice.randrange(min(len(content), 3000))] ^= 1 << choice.randrange(8)
    elif how == "head":
        content[:8] = choice.randbytes(8)
    elif how in ("cut", "empty"):
        content = content[: choice.randrange(len(content)) if how == "cut" else 0]
    elif how == "text":
        content = bytearray(choice.choice(TEXTS).encode())
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "loop":
        file.symlink_to(file)
    elif how != "missing":
        file.write_bytes(content)
    return f"{file.name}: {how}"


def try_all(folder: Path, count: int, seed: int) -> Counter[str]:
    """Return how many mutated sources were converted, and how many refused; assert that no refusal is raw."""
    choice = random.Random(seed)
    sources = write_sources(folder / "sources")
    found: Counter[str] = Counter()
    for _ in range(count):
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        source = choice.choice(sources)
        shutil.copytree(source, copy)
        done = mutate(copy, choice)
        said = None
        try:
            with warnings.catch_warnings(action="ignore"):
                hea.convert(copy)
        except hea.EfficientAttentionError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {source.name}, {done}: {type(error).__name__}: {error}") from error
        assert said is None or (len(said) <= 500 and "\n" not in said), f"seed {seed}, {source.name}, {done}: {said}"
        found["converted" if said is None else "refused"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(dict(try_all(Path(folder), options.count, options.seed)))


if __name__ == "__main__":
    main()
