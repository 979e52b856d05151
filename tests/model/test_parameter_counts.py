"""The exact number of parameters of every official model, as in the published files; test_plan.py compares them."""

from keras_vit.model.architectures import SIZES
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count


def test_a_big_vision_size_has_the_sum_of_its_matrices() -> None:
    for size, (hidden, mlp, _, _) in SIZES.items():
        attention, norms = 4 * hidden * (hidden + 1), 3 * 2 * hidden
        perceptron = (hidden + 1) * mlp + (mlp + 1) * hidden
        patches, class_token, positions = (16 * 16 * 3 + 1) * hidden, hidden, 5 * hidden
        config = ViTConfig.from_name(f"{size}/16", image_size=32, num_classes=0, num_layers=1)
        assert count(config).parameters == attention + norms + perceptron + patches + class_token + positions, size
