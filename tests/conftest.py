"""Settings of all tests: quiet logs, the same seeds, few garbage collections."""

import gc
import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Read by TensorFlow and Keras when they are first imported, which is after this file.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

# Hypothesis measures time; a busy machine is no defect.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Importing TensorFlow and collecting the tests make a million objects that stay. Python need not search them for
# garbage.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)  # a traced function allocates far more objects than Python's 700 to 2,000
    gc.enable()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed every test alike, whichever tests run before it: Keras draws its seeds from Python's generator."""
    random.seed(0)
    np.random.seed(0)
