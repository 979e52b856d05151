"""Models without values have the structure of the real ones."""

import random

import keras
import pytest

from keras_vit.model.cost import symbolic_model
from tiny_models import built

FIELDS = {"token": {}, "map": {"classifier": "map"}, "hybrid": {"resnet": {"num_layers": (1, 1)}, "patch_size": 1}}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_shapes_are_those_of_the_real_model(fields: dict[str, object]) -> None:
    model = built(**fields)
    shapes = {v.path: v.shape for v in symbolic_model(model.config).variables}
    assert shapes == {v.path: v.shape for v in model.variables}


def test_a_later_scope_gives_no_values_to_the_variables_of_a_symbolic_model() -> None:
    model = symbolic_model(built().config)
    with keras.StatelessScope():
        pass
    assert all(variable._value is None for variable in model.variables)


def test_a_symbolic_model_draws_no_random_numbers() -> None:
    config = built().config
    before = random.getstate()
    symbolic_model(config)
    assert random.getstate() == before
