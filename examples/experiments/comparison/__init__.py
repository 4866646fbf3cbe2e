"""What the experiments share: text, training, scores, and what a run leaves."""

import sys
from pathlib import Path

# example_data lies beside the experiments
sys.path.append(str(Path(__file__).parents[2]))
