"""The command line of lm-eval with this package imported: `python -m hf_efficient_attn.lm_eval --model hf …`

Its arguments are those of `lm_eval`, which has none that imports a package:

    python -m hf_efficient_attn.lm_eval --model hf --model_args pretrained=FOLDER --tasks lambada_openai
"""

import importlib


def main() -> None:
    """Run lm-eval."""
    # the families are registered since the package of this module was imported
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
