"""Settings of all tests: quiet logs, the same seeds, few garbage collections."""

import gc
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Read by TensorFlow and Keras when they are first imported, which is after this file.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: threads would only wait for each other
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis measures time; a busy machine is no defect.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Importing TensorFlow and collecting the tests make a million objects that stay. Python need not search them for
# garbage.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest test first: at the end it would have a core alone."""
    items.sort(key=lambda item: "test_workers" not in item.nodeid)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000)  # a traced function allocates far more objects than Python's 700 to 2,000
    gc.enable()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed every test alike, whichever tests run before it: Keras draws its seeds from Python's generator."""
    random.seed(0)
    np.random.seed(0)


# ---- SavedModels: an export takes 5 s, so each is made once


class Saved(NamedTuple):
    """A model and its SavedModel: the folder, the export's report and the loaded signatures."""

    model: Any
    folder: Path
    report: Any
    call: Any


def _save(folder: Path, model: Any, **options: Any) -> Saved:
    import tensorflow as tf

    from keras_vit import export

    report = export.saved_model(model, folder, **options)
    return Saved(model, folder, report, tf.saved_model.load(str(folder)).signatures)


@pytest.fixture(scope="session")
def saved_digits(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the trained digits model, saved with other names of its classes and with warm-up requests."""
    from keras_vit import zoo

    folder = tmp_path_factory.mktemp("models") / "digits" / "1"
    labels = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return _save(folder, zoo.load("digits"), labels=labels, top=3, warmup=(1, 4))


@pytest.fixture(scope="session")
def saved_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a grey hybrid of five classes without names, saved without warm-up requests."""
    from tiny_models import VARIANTS, built

    model = built(num_layers=1, num_channels=1, **VARIANTS["hybrid"])
    return _save(tmp_path_factory.mktemp("models") / "hybrid" / "1", model, warmup=())


@pytest.fixture(scope="session")
def saved_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a float32 model that is saved with bfloat16 weights."""
    from tiny_models import built

    model = built(hidden_size=256, mlp_dim=1024)
    return _save(tmp_path_factory.mktemp("models") / "bfloat16" / "1", model, dtype="bfloat16")
