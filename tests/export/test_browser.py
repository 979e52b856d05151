"""The page of examples/browser gives Python's results in a headless Chromium without internet.

`make test-browser` runs it: it needs Chromium and `npm ci` in examples/browser.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from headless_browser import Page, served
from keras_vit import VisionTransformer, export, zoo
from keras_vit.model import preprocess
from places import ROOT

pytestmark = pytest.mark.browser
EXAMPLE = ROOT / "examples" / "browser"
SAMPLE = EXAMPLE / "sample.png"
SKLEARN = importlib.util.find_spec("sklearn")  # not imported: only the path of its photo is needed
PHOTO = Path(str(SKLEARN and SKLEARN.origin)).parent / "datasets" / "images" / "china.jpg"  # 640x427 pixels
# Options of each file, and the largest accepted error of a logit against ai-edge-litert on this machine. float32:
# another order of additions, measured 2e-6. dynamic: this may round an activation to the next of 255 steps; measured
# 1e-6 to 1e-2, and the limit is the int8 file's own error against the model (0.1).
FILES: dict[str, tuple[dict[str, Any], float]] = {
    "none": ({"quantize": "none", "attention": True}, 1e-4),
    "dynamic": ({"quantize": "dynamic", "attention": True}, 0.1),
    "uint8": ({"quantize": "none", "input_dtype": "uint8"}, 1e-4),
    "probabilities": ({"quantize": "none", "output": "probabilities"}, 1e-5),
}
STATUS = "document.getElementById('status')"


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return zoo.load("digits")


@pytest.fixture(scope="module")
def folder(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder that a user would serve: the example and exported files."""
    if not (EXAMPLE / "node_modules").is_dir():
        pytest.fail("LiteRT.js is missing: `npm ci --prefix examples/browser`")
    site = tmp_path_factory.mktemp("site")
    for path in EXAMPLE.iterdir():
        (site / path.name).symlink_to(path)
    for name, (options, _) in FILES.items():
        export.tflite(model, site / f"{name}.tflite", **options)
    return site


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def load(page: Page, address: str, file: str) -> None:
    """Open the page with a model in its folder."""
    page.open(f"{address}index.html?model={file}.tflite")
    page.until("document.getElementById('status')?.textContent.startsWith('Ready')")


def choose(page: Page, selector: str, file: Path) -> str:
    """Choose a file and return the page's message."""
    page.evaluate(f"{STATUS}.className = 'asked'")
    page.choose(selector, file)
    return str(page.until(f"['done', 'error'].includes({STATUS}.className) && {STATUS}.textContent"))


def result(page: Page, name: str) -> np.ndarray:
    """Return numbers of the last result, such as "logits" or "attention.values"."""
    return np.array(page.evaluate(f"import('./app.js').then((app) => Array.from(app.page.result.{name}))"), np.float32)


def python(file: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of ai-edge-litert, from the file and the images alone."""
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(str(file)).get_signature_runner()(image=images)


def prepared(model: VisionTransformer, image: Path, file: str) -> np.ndarray:
    if file != "uint8":
        return model.preprocess(image)
    pixels = tf.image.resize(preprocess.decode(image)[None], model.config.image_size)
    return np.floor(pixels.numpy() + 0.5).astype(np.uint8)  # rounds halves up, as Math.round does


@pytest.mark.parametrize("image", [SAMPLE, PHOTO], ids=lambda path: path.stem)
@pytest.mark.parametrize("file", FILES)
def test_the_page_computes_what_python_does(
    page: Page, address: str, folder: Path, model: VisionTransformer, file: str, image: Path
) -> None:
    load(page, address, file)
    choose(page, "#image-file", image)
    wanted = python(folder / f"{file}.tflite", prepared(model, image, file))
    output = "probabilities" if file == "probabilities" else "logits"
    received = result(page, output)
    error = np.abs(received - wanted[output][0]).max()
    page.evaluate("document.getElementById('measure').click()")
    page.until(f"{STATUS}.textContent.startsWith('Median') && {STATUS}.className === 'done'")
    took = page.evaluate("document.getElementById('time-run').textContent")
    print(f"{file} {image.name}: largest error {error:.1e}, median {took}")
    assert error < FILES[file][1]
    assert received.argmax() == wanted[output].argmax()


def test_the_class_tokens_attention_is_shown_head_by_head(page: Page, address: str, model: VisionTransformer) -> None:
    load(page, address, "none")
    choose(page, "#image-file", SAMPLE)
    wanted = np.asarray(model.attention_maps(model.preprocess(SAMPLE))[-1])[0, :, 0, 1:]
    np.testing.assert_allclose(result(page, "attention.values"), wanted.ravel(), atol=1e-5)  # weights up to 1, float32
    assert page.evaluate("document.querySelectorAll('#heads input').length") == len(wanted) + 1  # the mean too
    load(page, address, "uint8")
    choose(page, "#image-file", SAMPLE)
    assert page.evaluate("document.getElementById('attention').hidden")  # a file without that output


def test_means_and_deviations_are_read_from_the_file(page: Page, address: str, folder: Path, tmp_path: Path) -> None:
    preprocessing = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    model = zoo.load("digits", preprocessing=preprocessing)
    export.tflite(model, tmp_path / "other.tflite", quantize="none")
    load(page, address, "none")
    choose(page, "#image-file", PHOTO)
    choose(page, "#model-file", tmp_path / "other.tflite")
    wanted = python(tmp_path / "other.tflite", model.preprocess(PHOTO))["logits"][0]
    np.testing.assert_allclose(result(page, "logits"), wanted, atol=FILES["none"][1])


def test_what_is_wrong_is_said_in_a_sentence(page: Page, address: str, tmp_path: Path) -> None:
    for selector, content, sentence in (
        ("#image-file", b"some text", "“wrong” is not an image"),
        ("#model-file", b"some text" * 99, "“wrong” is not a LiteRT model"),
        ("#model-file", b"\x10\0\0\0TFL3" + b"\xff" * 99, "LiteRT cannot run “wrong” here"),
    ):
        (tmp_path / "wrong").write_bytes(content)
        load(page, address, "none")
        assert sentence in choose(page, selector, tmp_path / "wrong")
        assert page.evaluate(f"{STATUS}.className") == "error"
        assert "three" in choose(page, "#image-file", SAMPLE)  # the previous model still works


def test_webgpu_gives_the_same_logits(address: str, folder: Path, model: VisionTransformer, tmp_path: Path) -> None:
    # SwiftShader is a GPU in software: it shows that the operators run, not how fast they are.
    flags = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader")
    with Page(tmp_path, *flags) as page:
        load(page, address, "none")
        page.until("!document.getElementById('backend').options[1].disabled")
        choose(page, "#image-file", PHOTO)
        page.evaluate(f"{STATUS}.className = 'asked'")
        page.evaluate("const one = document.getElementById('backend'); one.value = 'webgpu'")
        page.evaluate("document.getElementById('backend').dispatchEvent(new Event('change'))")
        page.until(f"{STATUS}.className === 'done'")
        assert page.evaluate("document.getElementById('time-backend').textContent") == "WebGPU"
        wanted = python(folder / "none.tflite", model.preprocess(PHOTO))["logits"][0]
        np.testing.assert_allclose(result(page, "logits"), wanted, atol=FILES["none"][1])
