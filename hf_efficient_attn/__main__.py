"""Command line `python -m hf_efficient_attn`, which also works from a source tree that is not installed."""

from hf_efficient_attn.cli import main

if __name__ == "__main__":
    main()
