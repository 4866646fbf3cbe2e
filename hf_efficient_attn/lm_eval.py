"""Command line of lm-eval with this package imported.

It takes the arguments of `lm_eval`, which has no option that imports a package:

    python -m hf_efficient_attn.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai
"""

import importlib


def main() -> None:
    """Run lm-eval."""
    # importing this module has imported the package, which registers the families
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
