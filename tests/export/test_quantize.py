"""Quantized files: the error of each mode on real images, the rounding of kernels, fixed ranges, and invalid input."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import dense, digits, export, zoo
from keras_vit._util import files
from keras_vit.export import exported, modes, samples, verification
from keras_vit.export.calibration import FileGraph, add_enlarged_crops
from keras_vit.export.litert.builder import Builder, schema
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.operators import INT4, INT8, Operators, RoundedDense, Storage
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.modes import Mode, Rule
from keras_vit.export.quantize import Tokens, gptq, quantize, round_dense
from litert_graph import interpreter, read_labels
from marks import full_except
from outlier_models import score
from tiny_models import FAMILIES, OTHERS, VARIANTS, built

pytest.importorskip("litert_quantizer")

# Lowest SQNR in dB of each mode on the digits, three below the measured one with these few images: other calibration
# images or another machine's kernels change it by less than two.
LEAST_SQNR = {"none": 100, "float16": 70, "dynamic": 39, "int8": 34, "int16x8": 33, "int4": 30}
CALIBRATION = 64  # images


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory):
    """Return the embedded model's float32 file, held-out images with labels, and calibration images."""
    model, data = zoo.load("digits"), digits.load()
    path = tmp_path_factory.mktemp("digits") / "float32.tflite"
    build_file(model, FilePlan()).write(path)
    images, calibration = (np.asarray(model.preprocess(x)) for x in (data.test_images, data.train_images[:CALIBRATION]))
    return model, path, images, data.test_labels, calibration


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "float32.tflite"
    model = built()
    build_file(model, FilePlan()).write(path)
    return path, samples.images(model.config, 8)


def results(path: Path, images: np.ndarray) -> np.ndarray:
    graph = interpreter.Interpreter(str(path), num_threads=1)
    graph.allocate_tensors()
    run = graph.get_signature_runner()
    return np.concatenate([run(image=image[None])["logits"] for image in images])


def sqnr(received: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(10 * np.log10((expected**2).sum() / ((received - expected) ** 2).sum()))


def unpacked(path: Path):
    s = schema()
    return s.ModelT.InitFromObj(s.Model.GetRootAs(path.read_bytes()))


def ruled(*rules: Rule) -> Mode:
    return Mode(name="mine", summary="", devices="", least_cosine=0.0, least_agreement=0.0, rules=rules)


def test_the_manuals_mode_works(tiny_file, tmp_path):
    manual = (files.data_folder("converters") / "README.md").read_text(encoding="utf-8")
    [table] = [block for block in re.findall(r"```toml\n(.*?)```", manual, re.DOTALL) if "[[rules]]" in block]
    (tmp_path / "mine.toml").write_text(table, encoding="utf-8")
    source, images = tiny_file
    path = tmp_path / "model.tflite"
    quantize(source, path, modes.load_mode(tmp_path / "mine.toml"), calibration=images)
    types = {tensor.name.decode(): tensor.type for tensor in unpacked(path).subgraphs[0].tensors}
    kept = {name for name, kind in types.items() if name.endswith("/kernel") and kind == schema().TensorType.FLOAT32}
    dense = (*(f"attention/{part}" for part in ("query", "key", "value", "out")), "mlp/dense1", "mlp/dense2")
    assert kept == {"head/kernel", *(f"block_0/{name}/kernel" for name in dense)}


@pytest.mark.parametrize("name", LEAST_SQNR)
def test_every_mode_keeps_the_digits(digit_files, tmp_path, name):
    model, _, images, labels, calibration = digit_files
    mode, path = modes.load_mode(name), tmp_path / "model.tflite"
    given = {"calibration": calibration} if mode.needs_calibration else {}
    report = export.tflite(model, path, quantize=name, verify=images[:64], **given)
    assert (report.mode, report.calibrated_on) == (name, False)
    assert b"M001" in path.read_bytes() and len(read_labels(path)) == 10
    received, expected = results(path, images), model.predict_on_batch(images)
    assert sqnr(received, expected) > LEAST_SQNR[name]
    lengths = np.linalg.norm(received, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((received * expected).sum(axis=1) / lengths).min() >= mode.least_cosine
    agreement = (received.argmax(axis=1) == expected.argmax(axis=1)).mean()
    assert agreement >= max(mode.least_agreement, 0.995 if name == "dynamic" else 0)
    accuracies = [(logits.argmax(axis=1) == labels).mean() for logits in (received, expected)]
    # The default mode may lose 0.2 points, less than one image (0.28 points); the others may lose three.
    assert abs(accuracies[0] - accuracies[1]) <= (0.002 if name in ("none", "float16", "dynamic") else 0.0084)


@pytest.mark.parametrize("variant", [{"resnet": {"num_layers": (1, 1), "width_factor": 0.5}, "patch_size": 1}, {}])
def test_integers_fit_hybrids_and_open_batches(tmp_path, variant):
    model = built(**variant)
    source, path = tmp_path / "float32.tflite", tmp_path / "model.tflite"
    build_file(model, FilePlan(batch=None, norms="int16")).write(source)
    images = samples.images(model.config, 8)
    quantize(source, path, modes.load_mode("int16x8"), calibration=images)
    assert sqnr(results(path, images), model.predict_on_batch(images)) > 20  # a wrong scale: 0


def float_operators(path: Path) -> list[str]:
    """Return the kinds of the operators of a file that have a float input or output."""
    s = schema()
    model = unpacked(path)
    [graph] = model.subgraphs
    names = {number: name for name, number in vars(s.BuiltinOperator).items() if isinstance(number, int)}
    types = [tensor.type for tensor in graph.tensors]
    return sorted(
        names[model.operatorCodes[row.opcodeIndex].builtinCode]
        for row in graph.operators
        if s.TensorType.FLOAT32 in [types[index] for index in (*row.inputs, *row.outputs) if index >= 0]
    )


@pytest.mark.parametrize(
    ("kind", "options", "inside"),
    [
        *(
            pytest.param(kind, {}, [], marks=() if kind == "hybrid" else pytest.mark.full)
            for kind in ("pure", "hybrid", "BiT", "map", "mixer", "rotary", "relative positions", "normalized")
        ),
        ("pure", {"input_dtype": "uint8"}, ["CAST"]),
        pytest.param("pure", {"attention": True}, ["DEQUANTIZE"], marks=pytest.mark.full),
    ],
)
def test_an_int16x8_file_has_floats_at_its_ends_alone(
    kind: str, options: dict[str, Any], inside: list[str], tmp_path: Path
) -> None:
    model = built(**(VARIANTS | FAMILIES | OTHERS)[kind])
    images = samples.pixels(model.config, 4) if options.get("input_dtype") else samples.images(model.config, 4)
    least = {"least_cosine": -1, "least_agreement": 0}
    export.tflite(model, tmp_path / "out.tflite", quantize="int16x8", calibration=images, **least, **options)
    assert float_operators(tmp_path / "out.tflite") == sorted(["DEQUANTIZE", "QUANTIZE", *inside])


@pytest.mark.full
@pytest.mark.parametrize("output", ["logits", "classes"])
def test_an_int16x8_file_of_maps_has_floats_at_its_ends_alone(output: str, tmp_path: Path) -> None:
    model = dense.segmenter(built(num_classes=0, num_layers=4), 3, head="dpt")
    images = samples.images(model.config, 8)
    options = {"calibration": images, "least_cosine": -1, "least_agreement": 0, "output": output}
    export.tflite(model, tmp_path / "out.tflite", quantize="int16x8", **options)
    ends = ["DEQUANTIZE", "QUANTIZE"] if output == "logits" else ["ARG_MAX", "DEQUANTIZE", "QUANTIZE"]
    assert float_operators(tmp_path / "out.tflite") == ends
    if output == "logits":
        expected, received = model.predict_on_batch(images), export.runner(tmp_path / "out.tflite")(images)
        assert score(expected.reshape(8, -1), received.reshape(8, -1)) > 0.99  # measured 0.9996


# With kernels of 4 bits that have integers of -8, which the builtin kernels read as 8, 47 of 100 classes are right.
@pytest.mark.parametrize("mode", full_except(["int4"], modes.mode_names()))
def test_a_file_gives_the_same_without_xnnpack(mode: str, tmp_path: Path) -> None:
    model, data, path = zoo.load("digits"), digits.load(), tmp_path / "digits.tflite"
    shown = model.preprocess(data.test_images[:100])
    needed = {"calibration": data.train_images[:64]} if modes.load_mode(mode).needs_calibration else {}
    export.tflite(model, path, quantize=mode, verify=shown, **needed)
    expected, call = model.predict_on_batch(shown), exported.load_exported(path).call_builtin
    assert call is not None
    received = np.concatenate([call(image)["logits"] for image in np.split(shown, 100)])
    assert (received.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.99
    assert sqnr(received, expected) >= modes.load_mode(mode).thresholds["sqnr"]
    kernels = [t for t in unpacked(path).subgraphs[0].tensors if t.type == schema().TensorType.INT4]
    assert bool(kernels) == (mode == "int4")


def test_a_file_that_only_xnnpack_runs_right_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = zoo.load("digits"), tmp_path / "digits.tflite"
    export.tflite(model, path)
    load = exported.load_exported

    def broken(*arguments: Any) -> exported.ExportedModel:
        file = load(*arguments)
        return dataclasses.replace(
            file, call_builtin=lambda images: {name: -values for name, values in file.call(images).items()}
        )

    monkeypatch.setattr(verification, "load_exported", broken)
    with pytest.raises(export.VerificationError, match="without XNNPACK.*least 19.9 dB.*Received: -6.0 dB"):
        export.verify(model, path)


@pytest.mark.parametrize("mode", ["int8", "int16x8"])
def test_kernels_with_a_scale_for_each_output_have_the_version_that_says_so(mode: str, tmp_path: Path) -> None:
    """Older runtimes run lower versions, and return wrong numbers: tflite-runtime 2.14 the biases alone."""
    model, path = zoo.load("digits"), tmp_path / "digits.tflite"
    export.tflite(model, path, quantize=mode, calibration=digits.load().train_images[:16], least_agreement=0)
    read, s = unpacked(path), schema()
    [graph] = read.subgraphs
    count = 0
    for row in graph.operators:
        code = read.operatorCodes[row.opcodeIndex]
        if code.builtinCode != s.BuiltinOperator.FULLY_CONNECTED:
            continue
        kernel = graph.tensors[row.inputs[1]]
        if np.size(getattr(kernel.quantization, "scale", None)) > 1:
            assert code.version == 12
            count += 1
    assert count >= 12


@pytest.mark.parametrize("weights", [1e-6, 0.0])
def test_an_output_of_a_tiny_kernel_keeps_its_bias(weights: float, tmp_path: Path) -> None:
    """The bias of a dead unit is 1, but its integer would exceed 32 bits. Cut off, an error of 0.15."""
    model = built()
    layer = model.get_layer("block_0").mlp.dense1
    kernel, bias = (np.array(variable.numpy()) for variable in (layer.kernel, layer.bias))
    kernel[:, 3] *= weights
    bias[3] = 1
    layer.kernel.assign(kernel)
    layer.bias.assign(bias)
    path, images = tmp_path / "out.tflite", samples.images(model.config, 8)
    export.tflite(model, path, quantize="int16x8", calibration=images, least_cosine=-1, least_agreement=0)
    assert sqnr(export.runner(path)(images), model.predict_on_batch(images)) > 30


def test_a_file_that_takes_pixels_is_calibrated_with_pixels(tmp_path):
    model = built()
    source, path = tmp_path / "float32.tflite", tmp_path / "model.tflite"
    build_file(model, FilePlan(input_dtype="uint8")).write(source)
    pixels = samples.pixels(model.config, 8)
    quantize(source, path, modes.load_mode("int8"), calibration=pixels)
    assert sqnr(results(path, pixels), results(source, pixels)) > 30  # measured 39
    with pytest.raises(ValueError, match=r"images are uint8 .*Received: float32"):
        quantize(source, path, modes.load_mode("int8"), calibration=samples.images(model.config, 8))


def test_weights_lie_inside_of_the_file_aligned_and_old_readers_find_the_operators(digit_files, tmp_path):
    _, source, _, _, calibration = digit_files
    path = tmp_path / "model.tflite"
    quantize(source, path, modes.load_mode("int8"), calibration=calibration[:2])
    model = unpacked(path)
    assert not any(buffer.offset for buffer in model.buffers)
    content = path.read_bytes()
    for buffer in model.buffers:
        if buffer.data is not None and len(buffer.data) > 1000:
            assert content.index(buffer.data.tobytes()) % 16 == 0
    assert all(code.deprecatedBuiltinCode == min(code.builtinCode, 127) for code in model.operatorCodes)


def test_of_several_rules_the_last_that_fits_counts(tiny_file, tmp_path):
    dense = ("FULLY_CONNECTED",)
    mode = ruled(
        Rule(operators=dense, weights=8),
        Rule(operators=dense, weights=32, names="block_0/mlp"),
        Rule(operators=dense, weights=4, names="block_0/mlp/dense2;"),
    )
    path = tmp_path / "model.tflite"
    build_file(built(), FilePlan(storage=mode)).write(path)
    types = {tensor.name.decode(): tensor.type for tensor in unpacked(path).subgraphs[0].tensors}
    s = schema().TensorType
    assert types["block_0/mlp/dense1/kernel"] == s.FLOAT32
    assert types["block_0/mlp/dense2/kernel"] == s.INT4
    assert types["block_1/mlp/dense2/kernel"] == s.INT8


@pytest.mark.parametrize("storage", [INT8, INT4], ids=["8", "4"])
def test_integers_are_what_the_runtime_computes_with(tmp_path, storage):
    random = np.random.default_rng(0)
    kernel = (random.normal(size=(5, 96)) * np.repeat([1, 0.1, 10], 32)).astype(np.float32)
    kernel[4] = 0  # without a range
    x, bias = np.rint(random.uniform(-127, 128, size=(7, 96))), random.normal(size=5)
    x[:, :2] = -127, 128  # the runtime's rounding of each row is exact then
    integers = storage.rounded(kernel)
    assert (np.abs(integers.floats() - kernel) <= 1.01 * integers.scales[:, None] / 2).all()
    integers.values[0, ::7] = -storage.largest
    ops = Operators(Builder(), storage, {"head": RoundedDense(integers, bias)})
    image = ops.builder.input("image", (7, 96))
    ops.builder.signature({"image": image}, {"logits": ops.dense(image, kernel, bias, "head")})
    ops.builder.write(tmp_path / "dense.tflite")
    run = interpreter.Interpreter(str(tmp_path / "dense.tflite"))
    received = run.get_signature_runner()(image=x.astype(np.float32))["logits"]
    expected = x @ integers.floats().T.astype(np.float64) + bias
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def textbook(kernel: np.ndarray, squares: np.ndarray, steps: np.ndarray, storage: Storage) -> np.ndarray:
    """Quantize by Optimal Brain Quantization with a fixed order of columns (GPTQ, section 3, equation 2).

    The inverse of the remaining matrix is computed again for every column."""
    order = np.argsort(-np.diag(squares), kind="stable")
    damped = squares + 0.01 * np.diag(squares).mean() * np.eye(len(squares))
    weights = kernel.astype(np.float64)
    for place, column in enumerate(order):
        left = order[place:]
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        rounded = (
            np.rint(weights[:, column] / steps[:, column]).clip(-storage.largest, storage.largest) * steps[:, column]
        )
        error = (weights[:, column] - rounded) / inverse[0, 0]
        weights[:, left] -= np.outer(error, inverse[0])
        weights[:, column] = rounded
    return weights


@pytest.mark.parametrize("storage", [INT8, INT4], ids=["8", "4"])
def test_gptq_is_the_papers_across_blocks_of_columns(monkeypatch, storage):
    monkeypatch.setattr("keras_vit.export.quantize.BLOCK_COLUMNS", 24)
    monkeypatch.setattr("keras_vit.export.quantize.SWEEPS", 0)
    random = np.random.default_rng(0)
    inputs = random.normal(size=(300, 64)) @ random.normal(size=(64, 64))
    kernel = random.normal(size=(50, 64)).astype(np.float32)
    received = gptq(kernel, inputs.T @ inputs, storage)
    steps = received.scales[:, None].repeat(64, axis=1)
    # Results are multiples of the scale, so they differ by float32 rounding or by a whole step.
    expected = textbook(kernel, inputs.T @ inputs, steps, storage)
    assert np.abs(received.floats() - expected).max() < 1e-3 * steps.min()
    nearest = storage.rounded(kernel).floats()
    errors = [np.square(inputs @ (made - kernel).T).sum() for made in (received.floats(), nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_kernels_of_four_bits_are_rounded_again_until_no_single_change_helps(monkeypatch):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(300, 64)) @ random.normal(size=(64, 64))
    squares, kernel = inputs.T @ inputs, random.normal(size=(50, 64)).astype(np.float32)
    damped = squares + 0.01 * np.diag(squares).mean() * np.eye(64)
    errors = []
    for sweeps in (0, 2, 50):
        monkeypatch.setattr("keras_vit.export.quantize.SWEEPS", sweeps)
        integers = gptq(kernel, squares, INT4)
        error = integers.floats() - kernel
        errors.append((error @ damped * error).sum())
    assert errors[0] > 1.02 * errors[1] > errors[2]
    steps = integers.scales[:, None]
    best = np.rint(integers.values - error @ damped / np.diag(damped) / steps).clip(-INT4.largest, INT4.largest)
    assert (best == integers.values).mean() > 0.999  # float32 decides near ties


def test_gptq_takes_inputs_that_are_never_used_and_kernels_of_zeros():
    received = gptq(np.zeros((2, 3), np.float32), np.zeros((3, 3)), INT4)
    assert (received.floats() == 0).all()


def test_what_the_head_reads_weighs_at_least_a_quarter_of_all_tokens_in_the_rounding():
    weights = Tokens(total=17, final=1).weights((2, 17, 8)).reshape(2, 17)
    assert (weights[:, 0] == 17 / 4).all()
    assert (weights[:, 1:] == 1).all()
    assert (Tokens(total=17, final=17).weights((2, 17, 8)) == 1).all()  # the head reads their mean
    assert (Tokens(total=17, final=1).weights((2, 1, 8)) == 1).all()  # the last block computes the first token alone


def test_enlarged_parts_are_of_the_same_picture():
    rows = np.linspace(0, 9, 10, dtype=np.float32)[:, None, None]
    images = np.tile(
        np.concatenate([rows + 0 * rows.swapaxes(0, 1), 0 * rows + rows.swapaxes(0, 1)], axis=2), (5, 1, 1, 1)
    )
    shown = add_enlarged_crops(images)
    np.testing.assert_array_equal(shown[:5], images)
    # Of rows and of columns: still ramps, less steep, upwards. The borders repeat half a pixel.
    for values in (shown[5:, :, 0, 0], shown[5:, 0, :, 1]):
        steps = np.diff(values)[:, 1:-1]
        assert np.ptp(steps, axis=1).max() < 1e-5 and (steps > 0.699).all() and (steps < 1).all()
        assert np.ptp(steps[:, 0]) > 0.01  # each image has a part of its own
    pixels = add_enlarged_crops(np.full((2, 3, 4, 3), 255, np.uint8))
    assert pixels.dtype == np.uint8 and (pixels == 255).all()


def test_positions_are_stored_as_the_mode_says_and_added_in_float32(tmp_path):
    s, path = schema(), tmp_path / "model.tflite"
    for name, dtypes in (("int4", {s.TensorType.FLOAT16, s.TensorType.FLOAT32}), ("dynamic", {s.TensorType.FLOAT32})):
        build_file(built(), FilePlan(storage=modes.load_mode(name))).write(path)
        tensors = unpacked(path).subgraphs[0].tensors
        assert {tensor.type for tensor in tensors if tensor.name.startswith(b"position/embedding")} == dtypes


@pytest.mark.full
def test_calibration_images_make_dynamic_files_more_exact(digit_files, tmp_path):
    model, source, images, _, calibration = digit_files
    mode, path = modes.load_mode("dynamic"), tmp_path / "out.tflite"
    figures = []
    for rounded in ({}, round_dense(source, mode, calibration, Tokens.from_model(model))):
        build_file(model, FilePlan(storage=mode, rounded=rounded)).write(path)
        figures.append(sqnr(results(path, images), model.predict_on_batch(images)))
    assert figures[1] > figures[0] + 2  # dB; measured 4


def test_the_bias_makes_up_for_the_mean_error_of_a_rounded_kernel(tiny_file):
    source, images = tiny_file
    rounded = round_dense(source, modes.load_mode("dynamic"), images, Tokens(total=17, final=1))["embedding"]
    graph = FileGraph.read(np.fromfile(source, np.uint8))
    [layer] = [operator for operator in graph.operators if graph.name(operator) == "embedding"]
    patches = images.reshape(-1, 4, 8, 4, 8, 3).swapaxes(2, 3).reshape(-1, 192)
    mean, kernel, bias = patches.mean(axis=0), graph.kernel(layer), graph.bias(layer)
    error = kernel @ mean - rounded.kernel.floats() @ mean
    assert np.abs(error).max() > 1e-4
    np.testing.assert_allclose(rounded.bias - bias, error, atol=1e-6)


def test_bad_images_and_rules_are_refused_before_any_file(tiny_file, tmp_path, monkeypatch):
    source, images = tiny_file
    path = tmp_path / "model.tflite"
    for bad, message in (
        (None, "Received: None"),
        (np.zeros((0, 32, 32, 3), np.float32), r"float32 \(0, 32, 32, 3\)"),
        (np.zeros((2, 16, 16, 3), np.float32), r"float32 \(2, 16, 16, 3\)"),
        (np.zeros((32, 32, 3), np.float32), r"float32 \(32, 32, 3\)"),
        (np.zeros((2, 32, 32, 3), np.uint8), "Received: uint8"),
        (np.full((2, 32, 32, 3), np.nan, np.float32), "NaN or infinity in 2 of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(source, path, modes.load_mode("int8"), calibration=bad)
    for rule, message in (
        (Rule(operators=("FULLY_CONECTED",), weights=8), "nearest is 'FULLY_CONNECTED'"),
        (Rule(operators=("*",), weights=8, names="blok"), "no operator of the file fits"),
        (Rule(operators=("BATCH_MATMUL",), weights=4), "BATCH_MATMUL"),
    ):
        with pytest.raises(ValueError, match=rf"Mode 'mine', rules\[0\].*{message}"):
            quantize(source, path, ruled(rule), calibration=images)
    monkeypatch.setitem(sys.modules, "litert_quantizer", None)
    with pytest.raises(ImportError, match=r"keras-vit-zoo\[litert\]"):
        quantize(source, path, modes.load_mode("int8"), calibration=images)
    assert not list(tmp_path.iterdir())


# ---- fixed ranges of 8 and 16 bits

GATED = "rotary beside learned positions, gated, normed"
# Kind of model -> layers of the last block, or of the head, whose ranges are fixed in `int8`.
FIXED: dict[str, list[str]] = {
    "pure": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    GATED: ["attention/key", "attention/query", "attention/value", "mlp/dense1", "mlp/gate"],
    "hybrid": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    "mixer": ["mlp/dense1", "token_mlp/dense1"],
    "map": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    "BiT": [],
}


def fixed_layers(path: Path) -> list[str]:
    """Return the names of the dense layers and convolutions of a file that take integers."""
    s = schema()
    model = s.ModelT.InitFromObj(s.Model.GetRootAs(path.read_bytes()))
    graph = model.subgraphs[0]
    kinds = {s.BuiltinOperator.FULLY_CONNECTED, s.BuiltinOperator.CONV_2D}
    layers = [one.inputs for one in graph.operators if model.operatorCodes[one.opcodeIndex].builtinCode in kinds]
    kernels = {graph.tensors[kernel]: graph.tensors[x] for x, kernel, *_ in layers}
    assert {kernel.type for kernel in kernels} == {s.TensorType.INT8}
    return sorted(
        kernel.name.decode().removesuffix("/kernel") for kernel, x in kernels.items() if x.type == s.TensorType.INT8
    )


@pytest.mark.parametrize("kind", full_except(["pure", "mixer", "BiT"], FIXED))
def test_int8_fixes_the_ranges_of_layers_that_read_a_norm(kind: str, tmp_path: Path) -> None:
    model, path = built(**(VARIANTS | FAMILIES | OTHERS)[kind]), tmp_path / "out.tflite"
    images = samples.images(model.config, 8)
    export.tflite(model, path, quantize="int8", calibration=images, least_cosine=-1, least_agreement=0)
    names = [f"block_{number}/{layer}" for number in (0, 1) for layer in FIXED[kind]]
    assert fixed_layers(path) == sorted([*names, *(["pool/attention/value", "pool/mlp/dense1"] * (kind == "map"))])


def test_other_layers_have_ranges_at_run_time() -> None:
    for name in ("embedding", "block_0/attention/out", "block_0/mlp/dense2", "head", "stage_0/conv1"):
        rule = modes.load_mode("int8").rule("FULLY_CONNECTED", name)
        assert rule is not None and (rule.weights, rule.activations) == (8, 32), name


@pytest.mark.parametrize("head", full_except(["multiscale"], ["multiscale", "dpt"]))
def test_heads_that_read_a_tensor_twice_have_fixed_ranges(head: str, tmp_path: Path) -> None:
    """Both heads have tensors of equal names: a norm of several blocks, a convolution with and without its ReLU."""
    model = dense.segmenter(built(num_classes=0, num_layers=4), 3, head=head)
    images = samples.images(model.config, 8)
    options: dict[str, Any] = {"calibration": images, "least_cosine": -1, "least_agreement": 0}
    export.tflite(model, tmp_path / "out.tflite", quantize="int8", **options)
    expected, received = model.predict_on_batch(images), export.runner(tmp_path / "out.tflite")(images)
    assert score(expected.reshape(8, -1), received.reshape(8, -1)) > 0.99


@pytest.mark.parametrize("kind", full_except(["pure", "rotary"], ["pure", "rotary", "map", "hybrid"]))
@pytest.mark.parametrize("norms", ["float", "int16"])
def test_norms_of_a_scaled_stream_compute_the_same_in_floats(tmp_path: Path, kind: str, norms: Any) -> None:
    model = built(**(VARIANTS | FAMILIES)[kind])
    scales = np.random.default_rng(3).uniform(0.1, 1, model.config.hidden_size)
    build_file(model, FilePlan(norms=norms, scales=scales, batch=None)).write(tmp_path / "out.tflite")
    shown = samples.images(model.config, 3)
    expected = model.predict_on_batch(shown)
    np.testing.assert_allclose(export.runner(tmp_path / "out.tflite")(shown), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("norms", "least", "most"), [("float", 0.01, 0.1), ("int16", 0.0, 0.005)])
def test_a_newton_step_makes_roots_of_16_bits_exact(tmp_path: Path, norms: str, least: float, most: float) -> None:
    x = np.geomspace(0.01, 1, 100, dtype=np.float32).reshape(1, 1, 1, 100)
    ops = Operators(Builder(), norms=norms)
    image = ops.builder.input("image", x.shape)
    same = ops.multiply(image, ops.constant(np.array(1.0), "one"), "x")
    result = ops.reciprocal_root(same, "norm")
    ops.builder.signature({"image": image}, {"logits": result})
    ops.builder.write(tmp_path / "float.tflite")
    rules = (Rule(operators=("*",), weights=8, activations=16), Rule(operators=("INPUT", "OUTPUT"), weights=32))
    mode = Mode(name="all", summary="", devices="", least_cosine=0, least_agreement=0, rules=rules)
    quantize(tmp_path / "float.tflite", tmp_path / "out.tflite", mode, calibration=x)
    error = np.abs(export.runner(tmp_path / "out.tflite")(x) * np.sqrt(x) - 1).max()
    assert least <= error <= most
