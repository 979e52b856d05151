"""Makes tests/data/keras_hub: tiny presets written by Keras Hub, and what Keras Hub computes with them.

Run with keras-hub 0.32.0, keras 3.15.1, tensorflow 2.21.0 and h5py 3.14.0:

    KERAS_BACKEND=tensorflow python tests/data/make_keras_hub.py
"""

from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

FOLDER = Path(__file__).with_name("keras_hub")
TINY = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}

# What is saved: arguments of ViTBackbone and of ViTImageClassifier.
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "classifier": ({"num_layers": 2}, {"num_classes": 5}),
    "gap": (
        {"use_class_token": False, "image_shape": (16, 24, 3), "patch_size": (8, 4)}
        | {"layer_norm_epsilon": 1e-3, "use_patch_bias": False, "dropout_rate": 0.1, "attention_dropout": 0.2},
        {"num_classes": 5, "pooling": "gap", "intermediate_dim": 7, "dropout": 0.3},
    ),
    "no_bias": ({"use_mha_bias": False, "use_mlp_bias": False}, {"num_classes": 5}),
}
IMAGE_CONVERTERS: dict[str, dict[str, Any]] = {
    "classifier": {"scale": 1 / 127.5, "offset": -1.0, "crop_to_aspect_ratio": False},
    "gap": {"scale": [0.02, 0.01, 0.04], "offset": [-2.0, -1.5, -3.0], "interpolation": "bicubic", "antialias": True},
}


def make(name: str) -> dict[str, np.ndarray]:
    """Saves a preset; returns inputs and outputs."""
    about_backbone, about_task = PRESETS[name]
    backbone = keras_hub.models.ViTBackbone(**{**TINY, **about_backbone})
    converter = keras_hub.layers.ViTImageConverter(
        image_size=backbone.image_shape[:2], **IMAGE_CONVERTERS.get(name, {})
    )
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    model = keras_hub.models.ViTImageClassifier(backbone, preprocessor=preprocessor, **about_task)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.5 if "gamma" in variable.path else 0, 0.3, variable.shape))
    images = rng.uniform(-1, 1, (2, *backbone.image_shape)).astype(np.float32)
    pixels = rng.integers(0, 256, (2, *backbone.image_shape), np.uint8)
    model.save_to_preset(str(FOLDER / name))
    outputs = {
        "images": images,
        "tokens": backbone(images),
        "logits": model(images),
        "pixels": pixels,
        "prepared": converter(pixels),
    }
    return {key: keras.ops.convert_to_numpy(value).astype(np.float32) for key, value in outputs.items()}


if __name__ == "__main__":
    for name in PRESETS:
        np.savez_compressed(FOLDER / f"{name}.npz", **make(name))
        for unused in ("metadata.json", "preprocessor.json"):
            (FOLDER / name / unused).unlink(missing_ok=True)
