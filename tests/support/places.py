"""Places of the repository, for tests and for the programs in this folder."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
DATA = TESTS / "data"  # official outputs
ROOT = TESTS.parent
