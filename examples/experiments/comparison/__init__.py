"""What the experiments share: text, training, scores, and the files of a run."""

import sys
from pathlib import Path

# the folder that holds example_data
sys.path.append(str(Path(__file__).parents[2]))
