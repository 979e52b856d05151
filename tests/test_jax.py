"""Everything that works on Keras' JAX back end gives TensorFlow's numbers, and starts TensorFlow where stated only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from places import DATA, ROOT

pytestmark = pytest.mark.jax

# Largest difference, as a share of the largest value. Measured: 1.8e-6 (attention), and 2.0e-5 (Lanczos), because
# TensorFlow resizes images in float32.
RELATIVE, OF_RESIZED_IMAGES = 1e-5, 5e-5

# One program, run in a new process for each back end. `keep` notes the outputs, and if TensorFlow is imported by then.
PROGRAM = """
import json, sys
from pathlib import Path

import numpy as np

import keras
from keras_vit import Preprocessing, converters, dense, digits, zoo

outputs, imported, refused = {}, {}, {}

def keep(call, *values):
    imported[call] = "tensorflow" in sys.modules
    outputs.update({f"{call} {i}": keras.ops.convert_to_numpy(value) for i, value in enumerate(values)})

def refuses(call, function):
    try:
        function()
    except ValueError as error:
        refused[call] = str(error)

reference = Path(sys.argv[1]) / "reference" / "vit_token"
data = digits.load()
pixels = data.test_images[:32]
keep("import keras_vit")
model = zoo.load("digits")
keep("zoo.load")
other = converters.load(reference / "checkpoint.npz")
keep("converters.load", other.predict(np.load(reference / "reference.npz")["input"], verbose=0))
keep("converters.load .keras", *converters.load(Path(sys.argv[1]) / "tiny.keras").get_weights())
images = model.preprocess(pixels)
keep("preprocess", images)
photo = np.random.default_rng(0).integers(0, 256, (90, 121, 4), np.uint8)
for number, options in enumerate((
    {"crop_fraction": 0.9, "interpolation": "bicubic", "antialias": True, "round_pixels": True},
    {"resize": "crop", "interpolation": "bicubic", "antialias": True},
    {"interpolation": "lanczos3", "crop_fraction": 0.875},
)):
    config = model.config.replace(preprocessing=Preprocessing(**options))
    keep(f"preprocess {number}", model.with_config(config).preprocess([photo, photo[..., :1], photo[:30]]))
keep("predict", model.predict(images, verbose=0))
keep("classify", [row[0].probability for row in model.classify(pixels, top=1)])
keep("embed", model.embed(pixels))
features = model.features(images)
keep("features", *features.values())
keep("feature_maps", *model.feature_maps(images, 2))
keep("attention_maps", *model.attention_maps(images))
copies = {
    "resized": model.resized(48),
    "segmenter": dense.segmenter(model, 3),
    "zero_shot_head": zoo.zero_shot_head(zoo.load("digits", num_classes=0), np.eye(3, 64), list("abc"), 5),
}
numbers = np.random.default_rng(1)
for layer in copies["segmenter"].head_layers:  # new weights: back ends draw other random numbers
    layer = copies["segmenter"].get_layer(layer)
    layer.set_weights([numbers.random(weight.shape) for weight in layer.get_weights()])
for call, copy in copies.items():
    keep(call, copy.predict(numbers.random((2, *copy.input_shape[1:]), np.float32), verbose=0))
keep("predict_maps", *copies["segmenter"].predict_maps([photo, photo[:50]]))
keep("the model of the copies", model.predict(images, verbose=0))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.001, momentum=0.9), loss, metrics=["accuracy"])
labels = (data.test_labels[:32] + 1) % 10  # wrong ones, so that there is something to learn
history = model.fit(images, labels, epochs=3, batch_size=8, shuffle=False, verbose=0).history
keep("fit", history["loss"], model.predict(images, verbose=0))
keep("evaluate", model.evaluate(images, labels, verbose=0))
model.save_weights("model.weights.h5")
model.load_weights("model.weights.h5")
keep("save_weights", model.predict(images, verbose=0))
converters.save(model, "model.npz", format="google")
keep("converters.save", *converters.load("model.npz").get_weights())
keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).save("plain.keras")
keep("Keras' save")
model.save("model.keras")
keep("save", keras.models.load_model("model.keras").predict(images, verbose=0))
keras.utils.save_img("photo.png", photo[..., :3], scale=False)
keep("file", model.preprocess("photo.png"), model.embed("photo.png"))

from keras_vit import batch, export, train

for mode in ("none", "dynamic"):
    report = export.tflite(model, f"{mode}.tflite", quantize=mode, verify=pixels)
    again = export.verify(model, f"{mode}.tflite", pixels)
    keep(f"export.tflite {mode}", [report.cosine, report.agreement, again.cosine, again.agreement])
    keep(f"file {mode}", export.runner(f"{mode}.tflite")(images[:1]))
if sys.argv[2] == "jax":
    recipe = train.recipe("finetune-digits", steps=2)
    refuses("train.run", lambda: train.run(recipe, model=model, data="digits", out="run"))
    for call in ("evaluate", "examine", "few_shot"):
        refuses(call, lambda: getattr(train, call)(model, "digits"))
    refuses("saved_model", lambda: export.saved_model(model, "saved"))
    refuses("batch.embed", lambda: batch.embed(model, "plain.keras", to="vectors"))
np.savez("outputs.npz", **outputs)
Path("facts.json").write_text(json.dumps({"imported": imported, "refused": refused}))
"""


def run(backend: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, str(DATA), backend]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "outputs.npz") as file:
        return dict(file), json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the program on both back ends: outputs and facts of each."""
    pytest.importorskip("jax")
    return {backend: run(backend, tmp_path_factory.mktemp(backend)) for backend in ("tensorflow", "jax")}


def test_every_call_gives_tensorflows_numbers(both: dict[str, Any]) -> None:
    (want, _), (got, _) = both["tensorflow"], both["jax"]
    assert want.keys() == got.keys() and len(want) > 50
    differences = {}
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        difference = np.abs(got[name].astype(np.float64) - value).max() / max(np.abs(value).max(), 1e-30)
        call = name.rpartition(" ")[0]
        differences[call] = max(float(difference), differences.get(call, 0.0))
    print({call: f"{difference:.1e}" for call, difference in differences.items()})
    limits = {call: OF_RESIZED_IMAGES if call.startswith("preprocess") else RELATIVE for call in differences}
    assert {call: difference for call, difference in differences.items() if not difference <= limits[call]} == {}


def test_tensorflow_starts_where_keras_starts_it_to_save(both: dict[str, Any]) -> None:
    _, facts = both["jax"]
    calls = list(facts["imported"])
    first = calls.index("Keras' save")  # of a model without a layer of ours
    assert first == calls.index("converters.save") + 1
    assert [call for call in calls[:first] if facts["imported"][call]] == []


def test_calls_that_are_tensorflows_say_so_and_what_to_do(both: dict[str, Any]) -> None:
    _, facts = both["jax"]
    assert facts["refused"].keys() == {"train.run", "evaluate", "examine", "few_shot", "saved_model", "batch.embed"}
    for call, message in facts["refused"].items():
        assert call in message and "KERAS_BACKEND=tensorflow" in message and message.endswith("=jax"), message
