"""Settings of all tests: quiet logs, the same seed, long files first."""

import gc
import os
import random
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Read by TensorFlow and Keras when they are first imported, which is after this file.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

# Files that take a minute or more. One process runs all tests of a file, so these start first: then no process runs
# long after the others have ended.
LONGEST = (
    *("test_training_run.py", "test_docs.py", "test_saved_model.py", "test_zoo.py", "test_model.py"),
    *("test_train_parity.py", "test_resume.py", "test_serving.py", "test_readme.py"),
)

# Hypothesis measures time; a busy machine is no defect.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Importing TensorFlow and collecting the tests make a million objects that stay. Python need not search them for
# garbage.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # all others keep their order


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)  # a traced function allocates far more objects than Python's 700 to 2,000
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def seeds_of_tensorflow() -> None:
    """Seed the stateful generators of TensorFlow and Keras once for a file.

    The package uses none of them. Setting the seed also makes TensorFlow forget every kernel and function that it has
    prepared, which costs more than most tests.
    """
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def seeds(seeds_of_tensorflow: None) -> None:
    """Seed every test alike, whichever tests run before it: Keras draws its seeds from Python's generator."""
    random.seed(0)
    np.random.seed(0)
