"""Copy the code of a model into its folder, so that it loads without this package.

    hf-efficient-attn export-code my_model

The command copies the source files that the model uses into the folder, and names them in its config.json
(`auto_map`), as every save does after `hea.hub.include_code(model)`. Loading the folder then needs only torch,
transformers and `trust_remote_code=True`. If there is no README.md, the command writes one, which says what the model
attends to and how to load it.
"""

import argparse
from pathlib import Path

from transformers.utils import CONFIG_NAME

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.hub.card import auto_class, model_card
from hf_efficient_attn.hub.copies import copy_files, include_code
from hf_efficient_attn.hub.saved_config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("folder", metavar="FOLDER", help="folder of a saved model; its config.json is rewritten")


def main(args: argparse.Namespace) -> None:
    """Write the files, and print how many.

    Raises:
        EfficientAttentionError: not a saved model, or a model that needs no code of this package.
    """
    if not (Path(args.folder) / CONFIG_NAME).is_file():
        raise CheckpointError(f"{args.folder} has no config.json. Give a folder that save_pretrained wrote.")
    config = include_code(load_config(args.folder))
    config.save_pretrained(args.folder)
    if not (card := Path(args.folder) / "README.md").exists():
        card.write_text(str(model_card(config)), encoding="utf-8")
    print(f"{args.folder}: {len(copy_files(config))} files of code. Load it with:")
    print(f"    model = {auto_class(config)}.from_pretrained({args.folder!r}, trust_remote_code=True)")
