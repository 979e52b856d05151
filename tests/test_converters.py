"""Official checkpoints give the results of the official code, and are written back with the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

import reference_cases as reference
from keras_vit import ViTConfig, converters
from marks import full_except
from model_weights import assert_same_bits, values
from tiny_models import VARIANTS, built

OFFICIAL = reference.of_kind("official_npz")
INTERPOLATED = reference.of_kind("official_npz_interpolation")
TARGETS = [(name, target["name"]) for name in INTERPOLATED for target in reference.CASES[name]["targets"]]
# Facts that a file cannot state itself.
FACTS: dict[str, dict[str, Any]] = {
    "vit_unpooled": {"classifier": "unpooled"},
    "vit_token_unpooled": {"classifier": "token_unpooled"},
}


def size(name: str) -> tuple[int, int]:
    height, width = reference.CASES[name]["image_size"]
    return height, width


def load(name: str, **options: Any) -> Any:
    """Load a case as its users do; they name an image size that is not a multiple of the patch."""
    if name == "vit_not_multiple":
        options = {"image_size": size(name)} | options
        with pytest.warns(UserWarning, match="^keras_vit: images of 35x38 pixels are no multiple of the 8x8 patch"):
            return converters.load(reference.checkpoint(name), **options)
    return converters.load(reference.checkpoint(name), config=FACTS.get(name), **options)


def feature(name: str) -> str:
    """Return the name in `model.features` of an official output: "tokens/block_03" is "block_3"."""
    kind, _, rest = name.partition("/")
    if kind == "resnet":
        return rest.replace("block", "stage_")
    if kind == "grid":
        return "embedding"
    if rest.startswith("block_"):
        return f"block_{int(rest.removeprefix('block_'))}"
    return {"posembed": "tokens", "encoder_norm": "encoder_norm"}.get(rest, kind)


def features(model: Any, images: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """Compute the official code's outputs with our model."""
    ours = {name: feature(name) for name in names}
    found = model.features(images, [name for name in ours.values() if name in model.feature_names])
    if "features" in ours:  # the official name of a headless model's output
        found["features"] = model(images)
    if "gn_root" in ours.values():
        root = model.get_layer("root")
        found["gn_root"] = root.gn(root.conv(images))
    return {name: np.asarray(found[own]) for name, own in ours.items()}


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_intermediate_result_is_the_official_codes_in_float32(name: str) -> None:
    want = reference.expected(name)
    images = want.pop("input")
    received = features(load(name), images, list(want))
    wrong = {
        output: error
        for output, value in want.items()
        if (error := reference.distance(received[output].reshape(value.shape), value)) > reference.tolerance(name)
    }
    assert not wrong


@pytest.mark.parametrize("name", OFFICIAL)
def test_results_are_the_official_codes_in_float64(name: str) -> None:
    want = reference.expected(name, float64=True)
    model = load(name, dtype="float64")
    received = features(model, reference.expected(name)["input"].astype(np.float64), list(want))
    for output, value in want.items():
        assert received[output].dtype == np.float64
        assert reference.distance(received[output], value) <= reference.tolerance(name, float64=True), output


@pytest.mark.parametrize("name", full_except(["vit_token"], OFFICIAL))
def test_a_compiled_call_gives_the_official_logits(name: str) -> None:
    want = reference.expected(name)
    logits = load(name).predict_on_batch(want["input"])
    assert reference.distance(logits, want.get("logits", want.get("features"))) <= reference.tolerance(name)


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_architecture_is_read_from_the_tensors(name: str) -> None:
    stated = reference.CASES[name]["model"]
    config = converters.read_config(reference.checkpoint(name), config=FACTS.get(name))
    transformer, resnet = stated["transformer"], stated["resnet"]
    assert (config.hidden_size, config.mlp_dim) == (stated["hidden_size"], transformer["mlp_dim"])
    assert (config.num_heads, config.num_layers) == (transformer["num_heads"], transformer["num_layers"])
    assert config.patch_size == tuple(stated["patches"]["size"])
    assert (config.classifier, config.num_classes) == (stated["classifier"], stated["num_classes"])
    assert config.representation_size == stated["representation_size"]
    assert (config.resnet is None) == (resnet is None)
    if config.resnet:
        assert config.resnet.num_layers == tuple(resnet["num_layers"])
        assert config.resnet.width_factor == resnet["width_factor"]
    assert config.image_size == ((32, 32) if name == "vit_not_multiple" else size(name))


@pytest.mark.parametrize("name", OFFICIAL + INTERPOLATED)
def test_the_format_is_recognised(name: str) -> None:
    assert converters.detect(reference.checkpoint(name)) == "google"


# ---- other resolutions


def at_target(name: str, target: str, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Load a case at another resolution; return the model and the official outputs there."""
    stated = next(one for one in reference.CASES[name]["targets"] if one["name"] == target)
    config = reference.CASES[name]["model"]["representation_size"]
    drops = config != reference.CASES[name]["checkpoint_model"]["representation_size"]
    facts = {"representation_size": None} if drops else None
    path = reference.checkpoint(name)
    model = converters.load(path, config=facts, image_size=tuple(stated["image_size"]), **options)
    want = reference.expected(name)
    return model, {key.removeprefix(f"{target}/"): want[key] for key in want if key.startswith(f"{target}/")}


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_position_embeddings_go_to_another_resolution_as_the_official_code_takes_them(name: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without its pre_logits the head is new and zero
        model, want = at_target(name, target)
    bound = reference.tolerance(name)
    assert reference.distance(values(model)["position/embedding"], want["posemb"]) <= bound
    assert reference.distance(features(model, want["input"], ["pre_logits"])["pre_logits"], want["pre_logits"]) <= bound
    if "logits_with_checkpoint_head" in want:
        assert reference.distance(model(want["input"]), want["logits_with_checkpoint_head"]) <= bound


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_other_resolutions_are_official_in_float64(name: str, target: str) -> None:
    model, want = at_target(name, target, dtype="float64")
    images = want["input"].astype(np.float64)
    exact = {key: value for key, value in reference.expected(name, float64=True).items() if key.startswith(target)}
    for key, value in exact.items():
        ours = "logits" if key.endswith("/logits_with_checkpoint_head") else "pre_logits"
        received = features(model, images, [ours])[ours]
        # SciPy interpolates float32 embeddings in float64 and rounds the result to float32, and so do we.
        assert reference.distance(received, value) <= reference.tolerance(name, float64=True)
    assert exact


@pytest.mark.parametrize(("name", "target"), [pair for pair in TARGETS if pair[1] != "t2_24x40"])
def test_a_new_head_is_zero_as_the_official_fine_tuning_leaves_it(name: str, target: str) -> None:
    model, want = at_target(name, target, num_classes=3)
    assert not want["logits_load_pretrained"].any()
    assert model(want["input"]).shape == (2, 3)
    assert not np.asarray(model(want["input"])).any()


@pytest.mark.parametrize("image_size", [(24, 48), (40, 16), 8])
def test_any_rectangle_is_interpolated_as_scipy_does(image_size: Any) -> None:
    tensors = reference.arrays(reference.checkpoint("vit_token"))
    table = tensors["Transformer/posembed_input/pos_embedding"]
    model = converters.load(reference.checkpoint("vit_token"), image_size=image_size)
    rows, columns = model.config.grid
    grid = ndimage.zoom(table[0, 1:].reshape(4, 4, -1), (rows / 4, columns / 4, 1), order=1)
    got = values(model)["position/embedding"]
    assert np.array_equal(got[0, 0], table[0, 0])
    # One rounding of float32 apart: both compute in float64.
    np.testing.assert_allclose(got[0, 1:], grid.reshape(rows * columns, -1), rtol=0, atol=3e-7)


def test_equal_numbers_of_tokens_on_another_grid_are_interpolated() -> None:
    path = reference.checkpoint("vit_token")  # 4 x 4 patches
    square, wide = converters.load(path), converters.load(path, image_size=(16, 64))  # 2 x 8
    before, after = values(square)["position/embedding"], values(wide)["position/embedding"]
    assert before.shape == after.shape
    assert not np.array_equal(before, after)
    # End points are aligned: the corners keep their embeddings.
    assert np.array_equal(after[0, [1, 8, 9, 16]], before[0, [1, 4, 13, 16]])


def test_a_file_with_a_grid_that_is_not_square_is_read_when_its_size_is_told(tmp_path: Path) -> None:
    model = built(image_size=(16, 48))
    path = converters.save(model, tmp_path / "noted.npz", format="google")
    assert_same_bits(values(converters.load(path)), values(model))  # the file states its size
    np.savez(tmp_path / "wide.npz", **reference.arrays(path))
    path = tmp_path / "wide.npz"  # as others write it
    with pytest.raises(converters.CheckpointError, match="fills no square grid"):
        converters.load(path)
    again = converters.load(path, config={"image_size": (16, 48)})
    assert_same_bits(values(again), values(model))
    larger = converters.load(path, config={"image_size": (16, 48)}, image_size=(32, 32))
    table = values(model)["position/embedding"][0, 1:].reshape(2, 6, -1)
    want = ndimage.zoom(table, (2, 4 / 6, 1), order=1).reshape(16, -1)
    np.testing.assert_allclose(values(larger)["position/embedding"][0, 1:], want, rtol=0, atol=3e-7)


# ---- heads


def test_as_many_classes_as_the_file_has_keep_its_head() -> None:
    path = reference.checkpoint("vit_token")
    assert_same_bits(values(converters.load(path, num_classes=7)), values(converters.load(path)))


def test_no_classes_are_no_head() -> None:
    want = reference.expected("vit_token")
    model = converters.load(reference.checkpoint("vit_token"), num_classes=0)
    assert "head/kernel" not in values(model)
    assert reference.distance(model(want["input"]), want["pre_logits"]) <= reference.tolerance("vit_token")


def test_a_headless_file_takes_a_new_head() -> None:
    path = reference.checkpoint("vit_headless")
    model = converters.load(path, num_classes=9)
    new = values(model)
    assert new["head/kernel"].shape == (32, 9)
    assert not new.pop("head/kernel").any()
    assert not new.pop("head/bias").any()
    assert_same_bits(new, values(converters.load(path)))


def test_leaving_pre_logits_out_resets_the_head() -> None:
    path = reference.checkpoint("vit_prelogits")
    whole = values(converters.load(path))
    model = converters.load(path, config={"representation_size": None})
    rest = values(model)
    assert model.config.num_classes == 7
    assert not rest.pop("head/kernel").any()
    assert not rest.pop("head/bias").any()
    assert_same_bits(rest, {name: value for name, value in whole.items() if not name.startswith(("head/", "pre_log"))})


def test_a_head_of_zeros_is_said_once_and_read(tmp_path: Path) -> None:
    model = built()
    model.get_layer("head").kernel.assign(np.zeros((32, 5)))
    model.get_layer("head").bias.assign(np.zeros(5))
    path = converters.save(model, tmp_path / "ViT-B_16.npz", format="google")
    with pytest.warns(UserWarning, match="^keras_vit: the head of ViT-B_16.npz is all zeros") as seen:
        loaded = converters.load(path)
    assert len(seen) == 1
    assert seen[0].filename == __file__  # the warning shows the caller's line
    assert_same_bits(values(loaded), values(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converters.load(path, num_classes=3)  # a new head is zero on purpose


# ---- numbering, wrappers


def renamed(path: Path, target: Path, change: Any) -> Path:
    """Copy an .npz and change the names of its tensors; None leaves one out."""
    np.savez(target, **{change(name): value for name, value in reference.arrays(path).items()})
    return target


@pytest.mark.parametrize(
    "numbers",
    [
        {"LayerNorm_0": "LayerNorm_0", "LayerNorm_2": "LayerNorm_1", "Attention_1": "Attention_0", "_3/": "_0/"},
        {"LayerNorm_0": "LayerNorm_3", "LayerNorm_2": "LayerNorm_7", "Attention_1": "Attention_12", "_3/": "_4/"},
        {"LayerNorm_0": "LayerNorm_9", "LayerNorm_2": "LayerNorm_10", "Attention_1": "Attention_5", "_3/": "_8/"},
    ],
    ids=["linen", "scrambled", "9 before 10"],
)
def test_children_of_a_block_are_numbered_in_any_way(tmp_path: Path, numbers: dict[str, str]) -> None:
    def change(name: str) -> str:
        if "encoderblock_" not in name:
            return name
        for old, new in (("MlpBlock_3/", f"MlpBlock{numbers['_3/']}"), *list(numbers.items())[:3]):
            if old in name:
                return name.replace(old, new)
        raise AssertionError(name)

    path = reference.checkpoint("vit_token")
    other = renamed(path, tmp_path / "other.npz", change)
    assert_same_bits(values(converters.load(other)), values(converters.load(path)))


def test_blocks_are_ordered_by_number(tmp_path: Path) -> None:
    model = built(num_layers=12)
    path = converters.save(model, tmp_path / "deep.npz", format="google")
    tensors = reference.arrays(path)
    np.savez(tmp_path / "sorted.npz", **{name: tensors[name] for name in sorted(tensors)})  # 0, 1, 10, 11, 2 ...
    assert_same_bits(values(converters.load(tmp_path / "sorted.npz")), values(model))


@pytest.mark.parametrize("prefix", ["opt/target/", "params/", "img/"])
def test_the_weights_are_found_inside_a_wrapper(tmp_path: Path, prefix: str) -> None:
    path = reference.checkpoint("vit_token")
    wrapped = {prefix + name: value for name, value in reference.arrays(path).items()}
    other = {"opt/state/step": np.int32(7), "txt/head/kernel": np.ones((2, 2)), "t": np.ones(1)}
    np.savez(tmp_path / "wrapped.npz", **wrapped, **other)
    assert_same_bits(values(converters.load(tmp_path / "wrapped.npz")), values(converters.load(path)))


# ---- saving


def published(name: str) -> dict[str, np.ndarray]:
    """Return a case's tensors under the published names."""
    if name == "vit_token_linen":
        return reference.arrays(reference.checkpoint("vit_token"))
    tensors = reference.arrays(reference.checkpoint(name))
    prefix = reference.CASES[name]["prefix"] or ""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@pytest.mark.parametrize("name", OFFICIAL + INTERPOLATED)
def test_saving_what_was_loaded_gives_the_published_tensors_to_the_bit(tmp_path: Path, name: str) -> None:
    path = converters.save(load(name), tmp_path / "saved.npz", format="google")
    assert_same_bits(reference.arrays(path), published(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vit_not_multiple
        again = converters.load(path, config=FACTS.get(name))
    assert_same_bits(values(again), values(converters.load(reference.checkpoint(name), config=FACTS.get(name))))
    assert list(tmp_path.iterdir()) == [path]


def test_group_norm_is_written_with_its_four_published_axes(tmp_path: Path) -> None:
    tensors = reference.arrays(converters.save(built(**VARIANTS["hybrid"]), tmp_path / "saved.npz", format="google"))
    shapes = {name: value.shape for name, value in tensors.items() if "/gn" in name or name.startswith("gn_")}
    assert "block1/unit1/gn_proj/scale" in shapes
    assert all(shape[:3] == (1, 1, 1) and len(shape) == 4 for shape in shapes.values())


def test_group_norm_is_read_with_one_axis_as_flax_saves_it_today(tmp_path: Path) -> None:
    path = reference.checkpoint("hybrid_stem_only")
    tensors = reference.arrays(path)
    np.savez(tmp_path / "flat.npz", **{k: v.reshape(-1) if "gn_" in k else v for k, v in tensors.items()})
    assert_same_bits(values(converters.load(tmp_path / "flat.npz")), values(converters.load(path)))


def test_other_precisions_are_written_as_float32(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    double = converters.load(path, dtype="float64")
    assert double(reference.expected("vit_token")["input"]).dtype == "float64"
    saved = converters.save(double, tmp_path / "saved.npz", format="google")
    assert_same_bits(reference.arrays(saved), reference.arrays(path))


def test_convert_takes_a_file_to_another_resolution_and_head(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    saved = converters.convert(path, tmp_path / "out.npz", format="google", image_size=48, num_classes=0)
    want = converters.load(path, image_size=48, num_classes=0)
    assert_same_bits(values(converters.load(saved)), values(want))
    assert converters.read_config(saved).image_size == (48, 48)


def test_a_table_of_ones_own_reads_and_writes(tmp_path: Path) -> None:
    from keras_vit._util import data_files

    text = (data_files.folder("converters") / "checkpoints" / "google.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace('"google"', '"mine"').replace("Transformer/encoder_norm/", "Transformer/last/"))
    model = built()
    path = converters.save(model, tmp_path / "mine.npz", format=str(mine))
    assert "Transformer/last/scale" in reference.arrays(path)
    assert_same_bits(values(converters.load(path, format=str(mine))), values(model))


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("prefix/registers", {"num_registers": 2}),
        ("scale1", {"layer_scale": 1e-5}),
        ("pre_norm", {"pre_norm": True}),
        ("pool/probe", {"classifier": "map"}),
        ("qkv_bias=False", {"qkv_bias": False}),
        ("activation='relu'", {"activation": "relu"}),
        ("patch_bias=False", {"patch_bias": False}),
        ("classifier='gap'", {"classifier": "gap", "class_token": True}),
        ("classifier='unpooled'", {"classifier": "unpooled", "class_token": True}),
        ("position", {"position": "sincos2d"}),
        ("position", {"position": "none"}),
        ("final_norm='pooled'", {"final_norm": "pooled", "classifier": "gap"}),
        ("distillation", {"distilled": True}),
        ("representation_activation='relu'", {"representation_size": 8, "representation_activation": "relu"}),
    ],
    ids=str,
)
def test_what_the_format_cannot_express_is_refused_by_name(tmp_path: Path, named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(converters.CheckpointError, match=named):
        converters.save(built(**changes), tmp_path / "out.npz", format="google")
    assert not list(tmp_path.iterdir())


STEM = VARIANTS["hybrid"]["resnet"]


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu_erf"},
        {"norm_epsilon": 1e-12},
        {**VARIANTS["hybrid"], "resnet": {**STEM, "conv_epsilon_place": "variance"}},
        {**VARIANTS["hybrid"], "resnet": {**STEM, "norm_epsilon": 1e-5}},
    ],
    ids=str,
)
def test_small_differences_that_the_format_cannot_say_are_told_and_noted(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = built(**changes)
    name = list(changes)[0]
    with pytest.warns(UserWarning, match=f"^keras_vit: google files do not say {name}=.*notes it in the file") as seen:
        path = converters.save(model, tmp_path / "out.npz", format="google")
    assert sum(str(warning.message).startswith("keras_vit:") for warning in seen) == 1
    assert getattr(converters.read_config(path), name) == getattr(model.config, name)
    assert_same_bits(values(converters.load(path)), values(model))


def test_a_class_token_outside_the_position_table_is_moved_into_it(tmp_path: Path) -> None:
    model = built(position_prefix=False)
    path = converters.save(model, tmp_path / "out.npz", format="google")
    np.savez(tmp_path / "plain.npz", **{k: v for k, v in reference.arrays(path).items() if "keras_vit" not in k})
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    # One more addition in another order: float32's noise through two blocks.
    plain = converters.load(tmp_path / "plain.npz")
    assert plain.config.position_prefix
    assert reference.distance(plain(images), np.asarray(model(images))) < 1e-6
    assert_same_bits(values(converters.load(path)), values(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "stochastic_depth": 0.2},
        {"labels": ("a", "b", "c", "d", "e"), "head_bias_init": -10.0},
        {"position_method": "bicubic"},
        {"representation_activation": "relu"},  # of a layer that the model does not have
    ],
    ids=str,
)
def test_what_no_file_holds_does_not_hinder_writing(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = built(**changes)
    path = converters.save(model, tmp_path / "out.npz", format="google")
    assert_same_bits(values(converters.load(path)), values(model))


def test_a_whole_config_states_the_facts_of_a_file() -> None:
    path = reference.checkpoint("vit_unpooled")
    config = converters.read_config(path, config={"classifier": "unpooled"})
    assert isinstance(config, ViTConfig)
    assert converters.load(path, config=config).config == config
