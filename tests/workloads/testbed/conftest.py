import sys
from pathlib import Path

# Where the scripts that trained the model are, which import each other by name.
sys.path.append(str(Path(__file__).parents[3] / "results" / "testbed" / "train"))
