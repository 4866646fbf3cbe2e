"""Add the code of a saved model to its folder, so that it loads where this package is not installed.

A copy of the sources that the model can reach, as `hea.hub.include_code` has it saved. Who loads the folder needs
torch, transformers and `trust_remote_code=True`.

    hf-efficient-attn export-code my_model
"""

import argparse
from pathlib import Path

from transformers.utils import CONFIG_NAME

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.hub.copies import copy_files, include_code
from hf_efficient_attn.hub.saved_config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("folder", help="a folder with a saved model, whose config.json is written anew")


def main(args: argparse.Namespace) -> None:
    """Write the files, and say how many.

    Raises:
        EfficientAttentionError: no saved model, or one that needs no code of this package.
    """
    if not (Path(args.folder) / CONFIG_NAME).is_file():
        raise CheckpointError(f"{args.folder} has no config.json. Give a folder that save_pretrained has written.")
    config = include_code(load_config(args.folder))
    config.save_pretrained(args.folder)
    print(f"{args.folder}: {len(copy_files(config))} files of code, which trust_remote_code=True loads")
