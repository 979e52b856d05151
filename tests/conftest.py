"""The same quiet, seeded start for every test."""

import os
import random
import sys

import numpy as np
import pytest

# Read by TensorFlow and Keras when they are first imported, which is after this file.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

# Files that take a minute or more. A file is one process' from its first test to its last, so these begin first: at the
# end nobody waits for one.
LONGEST = ("test_train_parity.py", "test_docs.py", "test_resume.py", "test_visualize_arrays.py", "test_readme.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)  # all others keep their order


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Random numbers start from the same place in every test, whichever tests run before it."""
    random.seed(0)
    np.random.seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)
