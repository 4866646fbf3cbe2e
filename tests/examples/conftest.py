"""The folders of the examples on the import path, as they are for scripts in them."""

import sys

from run_example import EXAMPLES

sys.path += [str(EXAMPLES), str(EXAMPLES / "experiments")]
