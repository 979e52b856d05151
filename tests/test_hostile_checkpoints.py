"""Any checkpoint, config.json or note is a model or one CheckpointError, in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reference_cases as reference
from forgery import entry, keras_archive, npz, safetensors
from keras_vit import converters
from keras_vit.converters.config_json import KEY
from keras_vit.converters.containers import open_container, write_npz
from keras_vit.model.cost import count
from model_weights import assert_same_bits, values
from tiny_models import VARIANTS, built

OF_A_FORMAT = {
    "google": "vit_token",
    "big_vision": "bv_gap_bf16_scan",
    "huggingface": "hf_cls_v5",
    "timm": "timm_token",
}
ONE_TENSOR = {  # format -> name of a matrix that the model needs
    "google": "Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel",
    "big_vision": "params/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel",
    "huggingface": "vit.encoder.layer.1.intermediate.dense.weight",
    "timm": "blocks.1.mlp.fc1.weight",
}

Tensors = dict[str, np.ndarray]


def refuse(path: Path, match: str, **options: Any) -> None:
    """Check that a file is refused soon, in one short error that names it."""
    start = time.process_time()  # CPU time, which does not depend on other processes
    with pytest.raises(converters.CheckpointError, match=match) as caught:
        converters.load(path, **options)
    assert time.process_time() - start < 5
    assert str(path.parent) in str(caught.value)
    assert len(str(caught.value)) < 2500


def changed(format: str, folder: Path, change: Callable[[Tensors], None], **metadata: str) -> Path:
    """Write a valid file of a format with its tensors changed, and with metadata."""
    with open_container(reference.checkpoint(OF_A_FORMAT[format])) as container:
        tensors = {name: container.read(name) for name in container.headers}
    change(tensors)
    if format in ("google", "big_vision"):
        return write_npz(folder / "file.npz", tensors, metadata=metadata)
    save_file(tensors, folder / "file.safetensors", metadata={"format": "pt", **metadata})
    shutil.copy(reference.checkpoint(OF_A_FORMAT[format]).parent / "config.json", folder)
    return folder / "file.safetensors"


# ---- config.json


def described(name: str, folder: Path, text: str | bytes) -> Path:
    """Write a case with another config.json."""
    shutil.copy(reference.checkpoint(name), folder / "model.safetensors")
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / "model.safetensors"


def with_field(name: str, folder: Path, path: str, value: Any) -> Path:
    """Write a case with one field of its config.json changed."""
    config = json.loads((reference.checkpoint(name).parent / "config.json").read_bytes())
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    return described(name, folder, json.dumps(config))


HF_FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (64, 10**12, 1e308, -32, "32", None, [32], True, {"a": 1}, 32.5),
    "num_attention_heads": (5, 0, -4, 10**12, "4", 1e308, [4], {}, float("nan"), 4.5),
    "image_size": (40, 0, -32, 10**12, 1e308, "32", [32], [32, 64], [[32]], {}, [32, -32]),
    "patch_size": (7, 10**12, "8", [8, 9], [], {}, -8),
    "num_hidden_layers": (3, 0, -1, 10**12, "2", [2]),
    "intermediate_size": (65, 10**12, {}, "64"),
    "num_channels": (1, 10**12, [3]),
    "qkv_bias": (False, "no", 7),
    "hidden_act": ("softmax", "", "__import__('os')", 3, ["gelu"], {"gelu": 1}),
    "layer_norm_eps": (-1, 1e400, "small", [1e-6], float("nan")),
    "hidden_dropout_prob": (1, -0.5, "much", 10**12),
    "id2label": ([0, 1], "cat", 7, {"1": "cat"}, {"0": 1, "2": 2}, {"zero": "a"}),
}
# Ignored values: the tensors state these fields.
HARMLESS = {("hidden_size", "None"), ("hidden_dropout_prob", "None")}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path in HF_FIELDS for value in HF_FIELDS[path]], ids=str)
def test_a_field_that_cannot_be_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    if (path, str(value)) in HARMLESS:
        want = converters.read_config(reference.checkpoint("hf_cls_v5"))
        assert converters.read_config(with_field("hf_cls_v5", tmp_path, path, value)) == want
    else:
        refuse(with_field("hf_cls_v5", tmp_path, path, value), ".")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("size", {"shortest_edge": 8000}, "at most 4096 pixels"),
        ("size", {"shortest_edge": 10**9}, "at most 4096 pixels"),
        ("size", {"height": 4097, "width": 4096}, "at most 4096 pixels"),
        ("size", {"height": 0.1, "width": 0.1}, "height must be an integer >= 1. Received: 0.1"),
        ("size", {"height": float("inf"), "width": 32}, "height must be an integer >= 1. Received: inf"),
        ("size", {"shortest_edge": True}, "shortest_edge must be an integer >= 1. Received: True"),
        ("size", -1, "shortest_edge must be an integer >= 1. Received: -1"),
        ("crop_size", {"height": 0.1, "width": 0.1}, "crop_size must be an integer >= 1. Received: 0.1"),
        ("crop_size", {"height": 1, "width": 1}, r"crop_fraction must be in \[0.0625, 1\]"),
        ("image_mean", ["x" * 10_000] * 3, "mean must be a tuple of numbers"),
    ],
    ids=str,
)
def test_sizes_of_a_preprocessor_have_bounds(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    config = (reference.checkpoint("hf_cls_v5").parent / "config.json").read_bytes()
    sizes = {"size": {"height": 32, "width": 32}, "do_center_crop": True, "crop_size": 32, "image_std": [1, 1, 1]}
    path = described("hf_cls_v5", tmp_path, config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**sizes, "image_mean": [0, 0, 0], key: value}))
    refuse(path, reason)


@pytest.mark.parametrize("key", ["num_attention_heads", "patch_size", "image_size", "hidden_act", "x" * 100_000])
@pytest.mark.parametrize("value", [{}, "x" * 100_000, ["x" * 100_000]], ids=lambda value: repr(value)[:9])
def test_messages_quote_at_most_200_characters(key: str, value: Any, tmp_path: Path) -> None:
    folder = Path(__file__).parent / "data" / "families" / "hf_clip_vision"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    if len(key) > 20:  # an unknown key is ignored
        converters.read_config(tmp_path)
        return
    with pytest.raises(converters.CheckpointError) as caught:
        converters.read_config(tmp_path)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 420


def test_a_label_that_no_file_can_have_is_named(tmp_path: Path) -> None:
    labels = json.loads((reference.checkpoint("hf_cls_v5").parent / "config.json").read_bytes())["id2label"]
    wrong = {**labels, "1": "cat \ud800"}
    refuse(with_field("hf_cls_v5", tmp_path, "id2label", wrong), r"labels must be valid Unicode.*'cat \\ud800'")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_args", 7),
        ("model_args", [1]),
        ("model_args.num_heads", 10**12),
        ("model_args.num_heads", "many"),
        ("model_args.embed_dim", 31),
        ("model_args.depth", 1e308),
        ("model_args.img_size", [10**9, 10**9]),
        ("model_args.img_size", 10**12),
        ("model_args.reg_tokens", 10**12),
        ("model_args.class_token", 3),
        ("model_args.global_pool", "max"),
        ("model_args.global_pool", []),
        ("model_args.act_layer", "gelu; rm"),
        ("pretrained_cfg.input_size", [3, 32]),
        ("pretrained_cfg.input_size", 3),
        ("pretrained_cfg.input_size", {"a": 1}),
        ("pretrained_cfg.mean", ["a", "b", "c"]),
        ("pretrained_cfg.mean", [1e400, 0, 0]),
        ("pretrained_cfg.mean", 0.5),
        ("pretrained_cfg.std", [0, 0, 0]),
        ("pretrained_cfg.std", [1, 2]),
        ("pretrained_cfg.crop_pct", 10**12),
        ("pretrained_cfg.crop_pct", -1),
        ("pretrained_cfg.crop_pct", "0.9"),
        ("pretrained_cfg.interpolation", "magic"),
        ("pretrained_cfg.interpolation", 7),
    ],
    ids=str,
)
def test_a_field_of_timm_that_cannot_be_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    refuse(with_field("timm_token", tmp_path, path, value), ".")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "a list, not an object"),
        ("null", "NoneType, not an object"),
        (b'{"a": "\xff\xfe\xfd"}', "not valid JSON"),
        (b"\x00" * 1000, "not valid JSON"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "not valid JSON"),
        ("[" * 1_000_000, "not valid JSON"),
        ('{"hidden_size": ' + "9" * 100_000 + "}", "not valid JSON"),
        ('{"a": "' + "x" * 50_000_000 + '"}', "has 50,000,009 bytes"),
    ],
    ids=lambda text: repr(text)[:20],
)
@pytest.mark.parametrize("name", ["hf_cls_v5", "timm_token"])
def test_a_config_that_is_no_config_is_refused(name: str, text: str | bytes, reason: str, tmp_path: Path) -> None:
    refuse(described(name, tmp_path, text), reason)


def test_a_contradiction_names_both_sides(tmp_path: Path) -> None:
    path = with_field("hf_cls_v5", tmp_path, "hidden_size", 64)
    refuse(path, "config.json that says hidden_size 64 where the tensors have 32")


# ---- tensors


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def apply(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def poisoned(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[array.size // 2] = value
        return array

    return change


@pytest.mark.parametrize("format", ONE_TENSOR)
def test_a_tensor_too_few_or_too_many_or_of_another_shape_is_named(format: str, tmp_path: Path) -> None:
    name = ONE_TENSOR[format]
    stray = f"{name.removesuffix('kernel').removesuffix('weight')}extra"
    rename = lambda tensors: tensors.update({stray: tensors.pop(name)})  # noqa: E731
    for change, reason in [
        (drop(name), "no tensor for block_|is not a Vision Transformer"),
        (put(stray, np.ones((2, 2), np.float32)), f"{stray} is left over"),
        (rename, "is left over|is not a Vision Transformer"),
        (
            apply(name, lambda array: np.ascontiguousarray(array[..., :-1])),
            "has shape|is not a Vision|does not describe",
        ),
        (apply(name, lambda array: array[None]), "has shape|is not a Vision|config.json that says"),
        (apply(name, lambda array: array.reshape(-1)), "has shape|is not a Vision"),
        (apply(name, lambda array: array[..., :0]), "has shape|is not a Vision|does not describe"),
        (apply(name, lambda _: np.array(1, np.float32)), "has shape|is not a Vision"),
        (apply(name, lambda array: array.astype(np.int32)), "has type int32.*expects floats"),
        (apply(name, lambda array: array.astype(bool)), "has type bool.*expects floats"),
    ]:
        refuse(changed(format, tmp_path, change), reason)


@pytest.mark.parametrize("format", ONE_TENSOR)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused_unless_asked_for(format: str, value: float, tmp_path: Path) -> None:
    path = changed(format, tmp_path, apply(ONE_TENSOR[format], poisoned(value)))
    refuse(path, "not finite; allow_nonfinite=True reads them")
    weights = values(converters.load(path, allow_nonfinite=True))
    assert sum(np.count_nonzero(~np.isfinite(array)) for array in weights.values()) == 1


@pytest.mark.parametrize("format", ONE_TENSOR)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats_are_read(format: str, dtype: str, tmp_path: Path) -> None:
    def cast(tensors: Tensors) -> None:
        for name, array in tensors.items():
            tensors[name] = array.astype(dtype)

    got = values(converters.load(changed(format, tmp_path, cast)))
    want = values(converters.load(reference.checkpoint(OF_A_FORMAT[format])))
    assert_same_bits(got, {name: array.astype(dtype).astype(np.float32) for name, array in want.items()})


SCAN = "params/Transformer/encoderblock/"


def test_a_scan_axis_of_any_length_is_no_memory(tmp_path: Path) -> None:
    for layers, reason in [
        (10**9, "params/Transformer/encoderblock/.* is left over|is not a Vision"),
        (2, "has shape|left over|no tensor for block_2"),
    ]:

        def stretch(tensors: Tensors, layers: int = layers) -> None:
            name = f"{SCAN}LayerNorm_0/scale"
            tensors[name] = np.zeros((layers, 0) if layers > 9 else (layers, 24), np.float32)

        refuse(changed("big_vision", tmp_path, stretch), reason)

    def all_empty(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(SCAN)]:
            tensors[name] = np.zeros((10**9, 0), np.float32)

    refuse(changed("big_vision", tmp_path, all_empty), "is not a Vision Transformer")


@pytest.mark.parametrize("format", ["google", "huggingface", "timm"])
@pytest.mark.parametrize("index", ["7", "999999999", "1" + "0" * 30, "-1", "1.5", "٣", "00"])
def test_a_block_of_any_number_is_a_problem(format: str, index: str, tmp_path: Path) -> None:
    name = ONE_TENSOR[format]
    new = name.replace("_1/", f"_{index}/").replace(".1.", f".{index}.")

    def rename(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(name)

    refuse(changed(format, tmp_path, rename), "is left over|no tensor for|config.json that says")


def narrow(width: int) -> Callable[[Tensors], None]:
    """Return a change to a few kilobytes that describe matrices of width x width."""

    def change(tensors: Tensors) -> None:
        tensors["embedding/kernel"] = np.zeros((1, 1, 1, width), np.float32)
        tensors["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"] = np.zeros((1, width), np.float32)

    return change


STAGES = {f"block{s}/unit1/conv1/kernel": np.zeros((1, 1, 1, 1), np.float32) for s in range(1, 16)} | {
    "conv_root/kernel": np.zeros((1, 1, 3, 64), np.float32)
}


@pytest.mark.parametrize("change", [narrow(30_000), narrow(100_000), lambda tensors: tensors.update(STAGES)])
def test_a_model_larger_than_its_file_is_never_built(change: Callable[[Tensors], None], tmp_path: Path) -> None:
    refuse(changed("google", tmp_path, change), "describes a model of at least|does not describe|a square grid")


def test_what_a_tensor_of_a_type_that_is_not_read_claims_does_not_count(tmp_path: Path) -> None:
    with open_container(reference.checkpoint("timm_token")) as container:
        tensors = {name: container.read(name) for name in container.headers}
    header: dict[str, Any] = {"__metadata__": {KEY: '{"num_heads": 4, "num_channels": 2147483648}'}}
    data = b""
    for name, array in tensors.items():
        header[name] = entry(len(data), len(data) + array.nbytes, shape=list(array.shape))
        data += array.tobytes()
    header["stray"] = entry(len(data), len(data), dtype="F8_E4M3", shape=[2**40])
    (tmp_path / "file").write_bytes(safetensors(header, data))
    refuse(tmp_path / "file", "no valid safetensors header: .* invalid shape")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bound_of_a_model_is_below_its_weights_and_near(name: str) -> None:
    model = built(**VARIANTS[name])
    held = sum(value.size for value in values(model).values())
    assert 0.85 * held < count(model.config).parameters <= held


# ---- the note


@pytest.mark.parametrize("format", ONE_TENSOR)
@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '"text"',
        "[" * 50_000,
        '{"a":' * 9_000,
        "9" * 50_000,
        '{"no_such_field": 1}',
        '{"hidden_size": 1073741824}',
        '{"hidden_size": -1}',
        '{"num_layers": 1000000000}',
        '{"num_layers": 1e308}',
        '{"mlp_dim": 100000000}',
        '{"num_classes": 1000000000000}',
        '{"num_registers": 1000000000000}',
        '{"representation_size": 100000000000}',
        '{"num_channels": 1000000000}',
        '{"image_size": 1000000000}',
        '{"image_size": [100000, 100000], "position": "sincos2d"}',
        '{"image_size": [100000, 100000], "position": "none"}',
        '{"image_size": "wide"}',
        '{"patch_size": 10000}',
        '{"num_heads": 7}',
        '{"num_heads": {}}',
        '{"classifier": "all"}',
        '{"classifier": []}',
        '{"class_token": "yes", "num_registers": "two"}',
        '{"activation": "__import__"}',
        '{"norm_epsilon": NaN}',
        '{"norm_epsilon": Infinity}',
        '{"norm_epsilon": "1"}',
        '{"resnet": {"num_layers": [1000000000], "width_factor": 1}}',
        '{"resnet": {"width_factor": 1e308}}',
        '{"resnet": {"no_such_field": 1}}',
        '{"resnet": 7}',
        '{"resnet": [1]}',
        '{"preprocessing": {"mean": "abc"}}',
        '{"preprocessing": {"no_such_field": 1}}',
        '{"preprocessing": 7}',
        '{"labels": 7}',
        '{"labels": {"a": 1}}',
        '{"position": "none"}',
        '{"pre_norm": true}',
        '{"distilled": true}',
        '{"distilled": []}',
        '{"class_token": ""}',
        '{"qkv_bias": "no"}',
        '{"dropout_rate": true}',
        f'{{"layer_scale": {10**30}}}',
        f'{{"head_bias_init": {10**400}}}',
        '{"layer_scale": "x"}',
        '{"position_method": "guess"}',
    ],
    ids=lambda note: note[:40],
)
def test_a_damaged_note_is_refused(format: str, note: str, tmp_path: Path) -> None:
    refuse(changed(format, tmp_path, lambda _: None, **{KEY: note}), ".")


@pytest.mark.parametrize(
    "comment", [b"{", b"{}x", b'{"keras_vit": 7}', b'{"keras_vit": {}}', b"{" * 60_000, b'{"\xff"}']
)
def test_a_damaged_archive_comment_is_refused(comment: bytes, tmp_path: Path) -> None:
    path = Path(shutil.copy(reference.checkpoint("vit_token"), tmp_path / "file.npz"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    refuse(path, ".")


def test_anybodys_other_comment_is_passed_over(tmp_path: Path) -> None:
    path = Path(shutil.copy(reference.checkpoint("vit_token"), tmp_path / "file.npz"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"from the shop"
    assert converters.read_config(path) == converters.read_config(reference.checkpoint("vit_token"))


# ---- our own tensors


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("keras_vit/position/embedding", np.zeros((1, 3, 32), np.float32), "."),
        ("keras_vit/position/embedding", np.zeros(0, np.float32), "."),
        ("keras_vit/position/embedding", np.float32(1), "."),
        ("keras_vit/prefix/cls", np.zeros((1, 1, 31), np.float32), "has shape"),
        ("keras_vit/prefix/cls", np.full((1, 1, 32), np.nan, np.float32), "not finite"),
        ("keras_vit/prefix/cls", np.zeros((1, 1, 32), np.int64), "expects floats"),
        ("keras_vit/no/such/variable", np.zeros(3, np.float32), "keras_vit/no/such/variable is left over"),
        ("keras_vit/", np.zeros(3, np.float32), "keras_vit/ is left over"),
        ("keras_vit/../../etc/passwd", np.zeros(3, np.float32), "is a path"),
        ("keras_vit/embedding/kernel", np.zeros((10**6, 10**6, 1, 0), np.float32), "."),
        ("keras_vit/embedding/kernel", np.zeros((1, 1, 1, 30_000), np.float32), "."),
        ("keras_vit/block_999999999/norm1/gamma", np.zeros(32, np.float32), "."),
    ],
    ids=lambda value: value if isinstance(value, str) else str(np.shape(value)),
)
def test_our_own_tensors_are_trusted_no_more_than_others(name: str, value: Any, reason: str, tmp_path: Path) -> None:
    tensors = reference.arrays(reference.checkpoint("vit_token"))
    (tmp_path / "file.npz").write_bytes(npz({**tensors, name: value}))
    refuse(tmp_path / "file.npz", reason)


# ---- memory

LOAD_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from keras_vit import converters

converters.load(sys.argv[1])  # so that the memory of TensorFlow is not counted
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)
for path in sys.argv[2:]:
    try:
        converters.load(path)
    except converters.CheckpointError as error:
        assert "Memory" not in str(error), error
    else:
        raise AssertionError(path + " was read")
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_what_is_refused_takes_less_than_128_mib(tmp_path: Path) -> None:
    paths = []
    for name, change, note in [
        ("wide", narrow(100_000), {}),
        ("stages", lambda tensors: tensors.update(STAGES), {}),
        ("classes", lambda _: None, {KEY: '{"num_classes": 1000000000}'}),
        ("grid", lambda _: None, {KEY: '{"position": "sincos2d", "image_size": [65536, 65536]}'}),
        ("layers", lambda _: None, {KEY: '{"num_layers": 1000000000}'}),
    ]:
        (tmp_path / name).mkdir()
        paths.append(changed("google", tmp_path / name, change, **note))
    (tmp_path / "json").mkdir()
    paths.append(described("hf_cls_v5", tmp_path / "json", '{"a": "' + "x" * 200_000_000 + '"}'))
    paths.append(tmp_path / "huge.keras")
    keras_archive(paths[-1], model={"hidden_size": 100_000, "mlp_dim": 400_000})
    command = [sys.executable, "-c", LOAD_IN_LITTLE_MEMORY, str(reference.checkpoint("vit_token")), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_labels_that_are_none_of_the_models_are_left_out(tmp_path: Path) -> None:
    path = with_field("hf_cls_v5", tmp_path, "id2label", {"0": "cat", "1": "dog"})
    assert converters.read_config(path).labels is None  # two names for seven classes
    path = with_field("hf_cls_v5", tmp_path, "id2label", {str(i): f"n{i}" for i in range(7)})
    assert converters.read_config(path).labels == tuple(f"n{i}" for i in range(7))
