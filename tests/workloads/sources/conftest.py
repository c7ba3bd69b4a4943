import sys
from pathlib import Path

# The hub that the tests share is a module of this folder.
sys.path.append(str(Path(__file__).parent))
