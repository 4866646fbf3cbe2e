"""The console script `hf-efficient-attn`: the command line, which imports the package when a command is called.

`import hf_efficient_attn` registers the families, for which it imports torch and transformers; `--help` needs neither.
"""

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command line of the installed package."""
    package = find_spec("hf_efficient_attn")
    assert package is not None
    assert package.origin is not None
    runpy.run_path(str(Path(package.origin).with_name("cli.py")))["main"]()


if __name__ == "__main__":
    main()
