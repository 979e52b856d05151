"""A LiteRT file gives the outputs of its model, and of the official code with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import reference_cases as reference
from format_cases import load as load_case
from keras_vit import VisionTransformer
from keras_vit.export.litert import builder as building
from keras_vit.export.litert.builder import ALIGNMENT, Builder, Tensor, schema
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.operators import FLOAT16, FLOAT32, INT8, Operators
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.litert.stem import group_norm
from keras_vit.model import layers as vit
from keras_vit.model.config import Preprocessing
from keras_vit.model.layers.resnet import GroupNormalization
from litert_graph import interpreter, run
from litert_graph import written as written_layers
from marks import full_except
from package_source import MODULES, imported_packages
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared

# Float32 against float64: two blocks gave up to 9e-7, Keras' own float32 up to 6e-7. The limit for the export is 1e-5.
# GELU by erf instead of tanh gives 3e-4, patches that are not centred 0.3.
NOISE = 2e-6
# Eight bits for kernels and activations of tiny random models: up to 3e-2 over all of them.
EIGHT_BITS = 6e-2
HALF = 3e-3  # float16 has 2**-11; through two blocks up to 9e-4
UNITS = {"num_layers": (1, 2), "width_factor": 0.5, "groups": 8}
EPSILONS = {"num_layers": (1, 1), "width_factor": 0.5, "conv_epsilon": 1e-2}
# The first seven run in `make test`, too.
MORE: dict[str, dict[str, Any]] = {
    "gelu_erf": {"activation": "gelu_erf"},
    "a rest at the border": {"image_size": (37, 50), "patch_size": 8},
    "an epsilon that shows": {"norm_epsilon": 0.1, "classifier": "map", "pre_norm": True},
    "epsilon at the variance": {"resnet": {**EPSILONS, "conv_epsilon_place": "variance"}, "patch_size": 1},
    "epsilon at the std": {"resnet": {**EPSILONS, "conv_epsilon_place": "std", "norm_epsilon": 0.1}, "patch_size": 1},
    "units, odd sides": {"resnet": UNITS, "patch_size": 1, "image_size": (45, 71), "num_channels": 1},
    "norm after map": {"classifier": "map", "final_norm": "pooled"},
    **{
        name: {"activation": name}
        for name in ("relu", "relu6", "leaky_relu", "silu", "hard_swish", "sigmoid", "tanh", "linear")
    },
    "no positions": {"position": "none"},
    "no positions, no class token": {"position": "none", "classifier": "gap"},
    "patches that are not square": {"image_size": (37, 50), "patch_size": (8, 4)},
    "one block": {"num_layers": 1},
    "2-D positions, not square": {"position": "learned2d", "image_size": (16, 40), "num_registers": 1},
    "norm after the token": {"final_norm": "pooled"},
    "norm after map, pre-norm": {"classifier": "map", "final_norm": "pooled", "pre_norm": True},
    "norm, not pooled": {"classifier": "unpooled", "final_norm": "pooled"},
    "map and registers": {"classifier": "map", "num_registers": 2, "pre_norm": True},
    "relative, all tokens": {"position": "relative", "position_place": "blocks", "classifier": "gap"},
    "relative, distilled": {"position": "relative", "position_place": "shared", "distilled": True},
    "rotary, all tokens": {**FAMILIES["rotary"], "classifier": "gap", "key_bias": True, "pre_norm": True},
    "class token and mean, headless": {**FAMILIES["class token and mean"], "num_classes": 0},
    "norms in attention and MLP": {"attention_norm": True, "mlp_norm": True},
    "norms in attention and MLP, all tokens": {"attention_norm": True, "mlp_norm": True, "classifier": "gap"},
    "RMSNorm": {"norm": "rms", "pre_norm": True},
    "RMSNorm, no biases": {"norm": "rms", "dense_bias": False, "qkv_bias": False, "classifier": "gap"},
    "RMSNorm, pooled": {"norm": "rms", "classifier": "gap", "final_norm": "pooled", "patch_norm": True},
    "norm of the patches": {"patch_norm": True, "num_registers": 1},
    "map without MLP": {"classifier": "map", "pool_mlp_dim": 0, "num_registers": 1},
    "mixer, gated, normed": {**OTHERS["mixer"], "gated_mlp": True, "mlp_norm": True},
    "mixer, normed after the probe": {**OTHERS["mixer"], "classifier": "map", "final_norm": "pooled"},
    "hybrid of version 2": {"resnet": OTHERS["BiT"]["resnet"], "patch_size": 1, "image_size": (37, 50)},
    "BiT with a probe, not even": {**OTHERS["BiT"], "classifier": "map", "image_size": (37, 50)},
    "headless BiT": {**OTHERS["BiT"], "num_classes": 0},
    "several class tokens beside relative biases": {"num_class_tokens": 3, "relative_bias": "shared"},
    "headless, distilled": {"distilled": True, "num_classes": 0},
    "headless representation": {"num_classes": 0, "representation_size": 24, "representation_activation": "gelu_quick"},
    **{f"headless {kind}": {"num_classes": 0, "classifier": kind} for kind in ("gap", "map", "unpooled")},
}
KINDS = {**VARIANTS, **FAMILIES, **OTHERS}
ALL = {**KINDS, **MORE}
QUICK = [*VARIANTS, *list(MORE)[:7]]  # test_family_abilities.py has the families
FOREIGN = {"CUSTOM", "VAR_HANDLE", "READ_VARIABLE", "SHAPE", "GATHER", "GATHER_ND", "PACK", "BROADCAST_TO", "WHILE"}
pytestmark = pytest.mark.filterwarnings("ignore:keras_vit.*no multiple")


def written(model: VisionTransformer, folder: Path, **options: Any) -> Any:
    """Return the interpreter of a model's file."""
    build_file(model, FilePlan(**options)).write(folder / "model.tflite")
    return interpreter.Interpreter(str(folder / "model.tflite"), num_threads=1)


def outputs(graph: Any, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of a file for images, by the signature's names, one call per batch."""
    [image] = graph.get_input_details()
    size = image["shape"][0]
    if -1 in image["shape_signature"]:
        size = len(images)
        graph.resize_tensor_input(image["index"], images.shape, strict=True)
    graph.allocate_tensors()
    run = graph.get_signature_runner()
    parts = [run(image=images[start : start + size]) for start in range(0, len(images), size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def output(graph: Any, images: np.ndarray) -> np.ndarray:
    [made] = outputs(graph, images).values()
    return made


def operators(graph: Any) -> list[str]:
    return [row["op_name"] for row in graph._get_ops_details()]


@pytest.mark.parametrize("kind", full_except(QUICK, ALL))
def test_a_file_computes_what_its_model_does(tmp_path: Path, kind: str) -> None:
    model = built("float64", **ALL[kind])
    images = prepared(model.config, batch=3)
    want = np.asarray(model(images))
    for batch in (1, None):
        graph = written(model, tmp_path, batch=batch)
        assert reference.distance(output(graph, images), want) < NOISE, batch
        assert max(len(row["shape"]) for row in graph.get_tensor_details()) <= 4
        # XNNPACK runs everything: one delegate with the inputs and outputs of the graph.
        assert operators(graph).count("DELEGATE") == 1
        assert not FOREIGN.intersection(operators(graph))
    if model.config.num_layers != 2:
        return
    # Smoothing and scales move factors, and change nothing. The largest scale also multiplies epsilon.
    random, width = np.random.default_rng(3), model.config.hidden_size
    norms = ["block_0/norm1", "block_0/norm2", "block_1/norm1"]
    norms += ["encoder_norm"] if model.config.final_norm != "none" else []
    smoothing = {name: random.uniform(0.5, 2, width) for name in norms}
    shifts = {name: np.linspace(-1, 1, width) for name in norms}
    scales = np.linspace(0.125, 0.25, width)
    graph = written(model, tmp_path, batch=3, smoothing=smoothing, scales=scales, shifts=shifts)
    assert reference.distance(output(graph, images), want) < NOISE
    whole = {row["name"]: row for row in graph.get_tensor_details()}
    kernel = graph.get_tensor(whole["block_0/mlp/dense1/kernel"]["index"])
    layer = model.get_layer("block_0")
    has_late_norm = model.config.has_map_head and model.config.final_norm == "pooled"
    is_plain = has_late_norm or model.config.final_norm == "none"  # channels stay as they are
    divided = smoothing["block_0/norm2"] * (1 if is_plain else scales / scales.max())
    kernel_before = np.asarray(layer.mlp.dense1.kernel) * (np.asarray(layer.norm2.gamma) / divided)[:, None]
    np.testing.assert_allclose(kernel, kernel_before.T, rtol=1e-6)  # one rounding to float32


def test_every_tensor_has_a_name_of_its_own() -> None:
    # The quantizer refuses others, and calibration finds tensors by these names.
    options: dict[str, Any] = {"input_dtype": "uint8", "source_size": (50, 41), "output": "probabilities"}
    for kind in ("pure", "hybrid", "map", "relative positions", "rotary", "mixer", "BiT"):
        model = built(**KINDS[kind])
        has_attention = bool(model.config.class_token) and model.config.has_attention
        names = [row.name for row in build_file(model, FilePlan(**options, attention=has_attention))._tensors]
        assert {name for name in names if names.count(name) > 1} == set(), kind


@pytest.mark.parametrize(("storage", "bound"), [(INT8, EIGHT_BITS), (FLOAT16, HALF)], ids=["int8", "float16"])
@pytest.mark.parametrize(
    "kinds",
    [
        ("hybrid", "map"),
        pytest.param(("pure", "distilled", "representation", "2-D positions", "pre-norm"), marks=pytest.mark.full),
    ],
)
def test_smaller_kernels_compute_nearly_the_same(
    tmp_path: Path, storage: Any, bound: float, kinds: tuple[str, ...]
) -> None:
    errors = {}
    for kind in kinds:
        model = built("float64", **VARIANTS[kind])
        images = prepared(model.config)
        graph = written(model, tmp_path, storage=storage)
        errors[kind] = reference.distance(output(graph, images), np.asarray(model(images)))
        assert operators(graph).count("DELEGATE") == 1
    assert not {kind: error for kind, error in errors.items() if not 0 < error < bound}


OFFICIAL = [name for name in reference.CASES if not name.startswith("interp")]


@pytest.mark.parametrize("name", full_except(OFFICIAL[::2], OFFICIAL))
def test_a_file_computes_what_the_official_code_does(name: str, tmp_path: Path) -> None:
    want = reference.expected(name)
    given = want["input"] if "input" in want else want["input_nhwc"]
    key = next(key for key in ("logits", "output", "features", "pooler_output") if key in want)
    model = load_case(name, tmp_path)
    graph = written(model, tmp_path, batch=None)
    assert reference.distance(output(graph, given), want[key]) < reference.tolerance(name)


def test_the_policy_of_the_model_does_not_matter(tmp_path: Path) -> None:
    images = prepared(built().config)
    want = np.asarray(built("float64")(images))
    assert reference.distance(output(written(built("mixed_bfloat16"), tmp_path), images), want) < NOISE


def test_probabilities_are_the_softmax_of_the_logits(tmp_path: Path) -> None:
    for kind in ("pure", "unpooled", "distilled"):
        model = built("float64", **VARIANTS[kind])
        images = prepared(model.config)
        made = outputs(written(model, tmp_path, output="probabilities"), images)
        raised = np.exp(np.asarray(model(images)))
        want = raised / raised.sum(axis=-1, keepdims=True)
        assert set(made) == {"probabilities"}
        np.testing.assert_allclose(made["probabilities"], want, atol=NOISE, err_msg=kind)


def test_attention_is_that_of_the_class_token_in_the_last_block(tmp_path: Path) -> None:
    kinds = ("pure", "distilled", "registers", "relative positions", "norm after the mean")
    for kind in (*kinds, "several class tokens", "several class tokens beside relative biases"):
        model = built("float64", **ALL[kind])
        images = prepared(model.config)
        made = outputs(written(model, tmp_path, attention=True, batch=None), images)
        prefix, class_tokens = model.config.num_prefix_tokens, model.config.num_class_tokens
        want = np.asarray(model.attention_maps(images)[-1])[:, :, :class_tokens, prefix:].mean(axis=2)
        assert set(made) == {"logits", "attention"}
        np.testing.assert_allclose(made["attention"], want, atol=NOISE, err_msg=kind)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("resnet", [None, {"num_layers": (1,), "width_factor": 0.5}], ids=["patches", "hybrid"])
def test_pixels_are_normalised_in_the_file(tmp_path: Path, resnet: Any, channels: int) -> None:
    """A hybrid pads the border with zeros: with pixels of the mean, not with black ones."""
    preprocessing = Preprocessing(mean=(0.4, 0.5, 0.6)[:channels], std=(0.2, 0.3, 0.1)[:channels])
    shape = {"num_channels": channels, "resnet": resnet, "patch_size": 1 if resnet else 8}
    model = built("float64", preprocessing=preprocessing, **shape)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, channels), np.uint8)
    want = np.asarray(model(model.preprocess(pixels)))
    for batch in (1, None):
        graph = written(model, tmp_path, input_dtype="uint8", batch=batch)
        assert reference.distance(output(graph, pixels), want) < NOISE


def test_only_the_tokens_that_are_read_leave_the_last_block(tmp_path: Path) -> None:
    for kind, count in (("pure", 1), ("distilled", 2), ("gap", 16)):
        graph = written(built(**VARIANTS[kind]), tmp_path)
        shapes = {row["name"]: tuple(row["shape"]) for row in graph.get_tensor_details()}
        assert shapes["block_1/mlp/dense1"] == (1, count, 64)
        assert shapes["block_0/mlp/dense1"][1] > 2
        # Keys and values of every token are computed only if this is less work: for 4 heads times `count` queries.
        assert shapes["block_1/attention/key"][1] == (16 if count == 16 else 4 * count)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "FULLY_CONNECTED"),
        ({"image_size": 35}, "CONV_2D"),
        ({"patch_size": (8, 4)}, "CONV_2D"),
        ({"resnet": {"num_layers": (1, 1), "width_factor": 0.5}, "patch_size": 1}, "FULLY_CONNECTED"),
    ],
)
def test_patches_are_rows_of_a_dense_layer_where_they_are_square_and_cover_the_image(
    changes: dict[str, Any], kind: str
) -> None:
    graph = build_file(built(**changes), FilePlan())
    [operator] = [row for row in graph._operators if graph._tensors[row.outputs[0]].name == b"embedding"]
    assert [code for code, _ in graph._opcodes][operator.opcodeIndex] == kind


def test_no_padding_is_next_to_a_max_pool() -> None:
    # LiteRT's GPU would merge them, and pad with the lowest value instead of zeros.
    graph = build_file(built(**OTHERS["BiT"]), FilePlan())
    codes = [code for code, _ in graph._opcodes]
    made_by = {output: codes[row.opcodeIndex] for row in graph._operators for output in row.outputs}
    [pool] = [row for row in graph._operators if codes[row.opcodeIndex] == "MAX_POOL_2D"]
    assert made_by[pool.inputs[0]] == "ADD"


@pytest.mark.parametrize(
    ("kind", "name"), [("shared positions", "embedding"), ("shared relative positions", "table_17")]
)
def test_what_blocks_share_is_kept_once(kind: str, name: str) -> None:
    graph = build_file(built(**VARIANTS[kind], num_layers=3), FilePlan())
    names = [row.name.decode() for row in graph._tensors]
    assert names.count(f"position/{name}") == 1


def test_factors_of_another_width_or_name_are_refused() -> None:
    model = built()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"smoothing": {"block_0/norm1": np.ones(3)}}, "broadcast"),
        ({"scales": np.ones(3)}, "broadcast"),
        ({"smoothing": {"block_7/norm1": np.ones(32)}}, "block_7/norm1"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            build_file(model, FilePlan(**options))


def test_a_norm_may_read_a_norm(tmp_path: Path) -> None:
    model = built(classifier="gap", num_classes=0)
    norm = vit.LayerNormalization(name="second")
    two = keras.Model(model.inputs[0], norm(model.outputs[0]))
    norm.gamma.assign(np.linspace(1, 2, 32))
    two.config, two.task = model.config, model.task
    graph = written(two, tmp_path)
    images = prepared(model.config)
    assert reference.distance(output(graph, images), np.asarray(two(images))) < NOISE


def test_a_large_mean_costs_no_accuracy(tmp_path: Path) -> None:
    # mean(x^2) - mean(x)^2 cancels: with a mean of 100 deviations only three digits remain.
    x = np.random.default_rng(0).normal(100, 1, (1, 28, 28, 64)).astype(np.float32)
    norm = GroupNormalization()
    norm.build(x.shape)

    def layers(ops: Operators) -> tuple[Tensor, Tensor]:
        image = ops.builder.input("image", x.shape)
        return image, ops.add(*group_norm(ops, norm, image, "norm"), "sum")

    made = run(written_layers(layers, tmp_path / "norm.tflite"), x)
    groups = x.astype(np.float64).reshape(28 * 28, 32, 2)
    want = (groups - groups.mean((0, 2), keepdims=True)) / np.sqrt(groups.var((0, 2), keepdims=True) + norm.epsilon)
    # The last bit of a value near 100 is 8e-6, in x * scale, the mean and the sum. The one-pass formula gives 5e-4.
    assert reference.distance(made, want.reshape(x.shape)) < 3e-5


def test_writing_a_file_needs_no_tensorflow() -> None:
    modules = [module for module in MODULES if module.startswith("export.litert")]
    assert len(modules) > 8
    for module in modules:
        assert "tensorflow" not in imported_packages(module), module
    assert schema().__name__.startswith("ai_edge_litert")


# ---- the file itself

RANDOM = np.random.default_rng(0)
KERNEL, BIAS = RANDOM.normal(size=(5, 24)), RANDOM.normal(size=5)


def file_of(folder: Path, *, outside: bool = False, batch: int | None = 1, storage: Any = FLOAT32) -> Path:
    """Write a file with one dense layer from "image" to "logits"; its weights may lie behind the flatbuffer."""
    builder = Builder(description="one dense layer")
    image = builder.input("image", (batch, 24))
    builder.signature({"image": image}, {"logits": Operators(builder, storage).dense(image, KERNEL, BIAS, "dense")})
    builder.metadata("NOTE", b"by hand")
    path = folder / "dense.tflite"
    with pytest.MonkeyPatch.context() as patch:
        if outside:
            patch.setattr(building, "MAX_FLATBUFFER_BYTES", 0)
        builder.write(path)
    return path


@pytest.mark.parametrize("outside", [False, True])
def test_the_runtime_reads_what_was_written(tmp_path: Path, outside: bool) -> None:
    x = RANDOM.normal(size=(7, 24)).astype(np.float32)
    for storage, bound in ((FLOAT32, 1e-6), (FLOAT16, 1e-3), (INT8, 0.05)):
        graph = interpreter.Interpreter(str(file_of(tmp_path, storage=storage, outside=outside, batch=None)))
        assert graph.get_signature_list() == {"serving_default": {"inputs": ["image"], "outputs": ["logits"]}}
        # Values up to 10, of the type's rounding.
        np.testing.assert_allclose(run(graph, x), x @ KERNEL.T + BIAS, atol=bound * 10)
    with pytest.raises(ValueError, match="needs a signature"):
        Builder().write(tmp_path / "none.tflite")


@pytest.mark.parametrize("outside", [False, True])
def test_weights_are_aligned_and_where_the_file_says(tmp_path: Path, outside: bool) -> None:
    content = file_of(tmp_path, outside=outside).read_bytes()
    model = schema().Model.GetRootAs(content)
    held = [model.Buffers(number) for number in range(model.BuffersLength())]
    assert content[4:8] == b"TFL3"
    assert held[0].DataIsNone() and held[0].Offset() == 0  # buffer 0 is the empty one
    found = {}
    for number, buffer in enumerate(held[1:], start=1):
        if outside:
            assert buffer.DataIsNone()
            place, size = buffer.Offset(), buffer.Size()
        else:
            place = content.index(bytes(buffer.DataAsNumpy()))
            size = buffer.DataLength()
        assert place % ALIGNMENT == 0
        found[number] = content[place : place + size]
    assert KERNEL.astype(np.float32).tobytes() in found.values()
    assert found[model.Metadata(0).Buffer()] == b"by hand"
    assert model.Metadata(0).Name() == b"NOTE"
