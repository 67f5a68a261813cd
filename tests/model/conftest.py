"""Makes the helpers of these tests importable; packages of tests have no other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
