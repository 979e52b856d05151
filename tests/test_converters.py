"""Official checkpoints give the results of the official code, and are written back with the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

import reference_cases as reference
from keras_vit import converters
from model_weights import assert_same_bits, values
from tiny_models import built

OFFICIAL = reference.of_kind("official_npz")
INTERPOLATED = reference.of_kind("official_npz_interpolation")
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


def test_a_compiled_call_gives_the_official_logits() -> None:
    for name in ("vit_token", "hybrid_r26"):
        want = reference.expected(name)
        logits = load(name).predict_on_batch(want["input"])
        assert reference.distance(logits, want["logits"]) <= reference.tolerance(name)


def test_the_architecture_is_read_from_the_tensors() -> None:
    for name in OFFICIAL:
        stated = reference.CASES[name]["model"]
        config = converters.read_config(reference.checkpoint(name), config=FACTS.get(name))
        transformer, resnet = stated["transformer"], stated["resnet"]
        assert (config.hidden_size, config.mlp_dim) == (stated["hidden_size"], transformer["mlp_dim"]), name
        assert (config.num_heads, config.num_layers) == (transformer["num_heads"], transformer["num_layers"]), name
        assert config.patch_size == tuple(stated["patches"]["size"]), name
        assert (config.classifier, config.num_classes) == (stated["classifier"], stated["num_classes"]), name
        assert config.representation_size == stated["representation_size"], name
        assert (config.resnet is None) == (resnet is None), name
        if config.resnet:
            assert config.resnet.num_layers == tuple(resnet["num_layers"]), name
            assert config.resnet.width_factor == resnet["width_factor"], name
        assert config.image_size == ((32, 32) if name == "vit_not_multiple" else size(name)), name


# ---- other resolutions


def test_a_new_head_is_zero_as_the_official_fine_tuning_leaves_it() -> None:
    for name in INTERPOLATED:
        want, target = reference.expected(name), reference.CASES[name]["targets"][0]["name"]
        images = want[f"{target}/input"]
        model = converters.load(reference.checkpoint(name), image_size=images.shape[1:3], num_classes=3)
        assert not want[f"{target}/logits_load_pretrained"].any()
        assert not np.asarray(model(images)).any()
        assert model.output_shape == (None, 3)


def test_a_file_with_a_grid_that_is_not_square_is_read_when_its_size_is_told(tmp_path: Path) -> None:
    model = built(image_size=(16, 48))
    path = converters.save(model, tmp_path / "noted.npz", format="google")
    assert_same_bits(values(converters.load(path)), values(model))  # the file states its size
    np.savez(tmp_path / "wide.npz", **reference.arrays(path))
    path = tmp_path / "wide.npz"  # as others write it
    with pytest.raises(converters.CheckpointError, match="does not fill a square grid"):
        converters.load(path)
    again = converters.load(path, config={"image_size": (16, 48)})
    assert_same_bits(values(again), values(model))
    larger = converters.load(path, config={"image_size": (16, 48)}, image_size=(32, 32))
    table = values(model)["position/embedding"][0, 1:].reshape(2, 6, -1)
    want = ndimage.zoom(table, (2, 4 / 6, 1), order=1).reshape(16, -1)
    np.testing.assert_allclose(values(larger)["position/embedding"][0, 1:], want, rtol=0, atol=3e-7)


# ---- heads


def test_the_head_is_kept_left_out_or_new_as_wanted() -> None:
    path = reference.checkpoint("vit_token")
    assert_same_bits(values(converters.load(path, num_classes=7)), values(converters.load(path)))
    want = reference.expected("vit_token")
    model = converters.load(path, num_classes=0)
    assert "head/kernel" not in values(model)
    assert reference.distance(model(want["input"]), want["pre_logits"]) <= reference.tolerance("vit_token")
    path = reference.checkpoint("vit_headless")
    new = values(converters.load(path, num_classes=9))
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
        assert_same_bits(values(converters.load(path)), values(model))
    assert [one.filename for one in seen] == [__file__]  # the warning shows the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converters.load(path, num_classes=3)  # a new head is zero on purpose


# ---- numbering, wrappers


NUMBERS = {
    "linen": ("LayerNorm_0", "LayerNorm_1", "Attention_0", "MlpBlock_0"),
    "scrambled": ("LayerNorm_3", "LayerNorm_7", "Attention_12", "MlpBlock_4"),
    "9 before 10": ("LayerNorm_9", "LayerNorm_10", "Attention_5", "MlpBlock_8"),
}


def test_children_of_a_block_are_numbered_in_any_way(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    for case, numbers in NUMBERS.items():
        tensors = {}
        for name, value in reference.arrays(path).items():
            olds = ("LayerNorm_0", "LayerNorm_2", "Attention_1", "MlpBlock_3")
            used = [pair for pair in zip(olds, numbers, strict=True) if pair[0] in name and "encoderblock_" in name]
            tensors[name.replace(*used[0]) if used else name] = value
        assert tensors.keys() != reference.arrays(path).keys()
        np.savez(tmp_path / f"{case}.npz", **tensors)
        assert_same_bits(values(converters.load(tmp_path / f"{case}.npz")), values(converters.load(path)))


def test_blocks_are_ordered_by_number(tmp_path: Path) -> None:
    model = built(num_layers=12)
    path = converters.save(model, tmp_path / "deep.npz", format="google")
    tensors = reference.arrays(path)
    np.savez(tmp_path / "sorted.npz", **{name: tensors[name] for name in sorted(tensors)})  # 0, 1, 10, 11, 2 ...
    assert_same_bits(values(converters.load(tmp_path / "sorted.npz")), values(model))


def test_the_weights_are_found_inside_a_wrapper(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    other = {"opt/state/step": np.int32(7), "txt/head/kernel": np.ones((2, 2)), "t": np.ones(1)}
    for prefix in ("opt/target/", "params/", "img/"):
        wrapped = {prefix + name: value for name, value in reference.arrays(path).items()}
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


@pytest.mark.filterwarnings("ignore:keras_vit. images of 35x38")
def test_saving_what_was_loaded_gives_the_published_tensors_to_the_bit(tmp_path: Path) -> None:
    for name in OFFICIAL + INTERPOLATED:
        path = converters.save(load(name), tmp_path / f"{name}.npz", format="google")
        assert_same_bits(reference.arrays(path), published(name))
        again = converters.load(path, config=FACTS.get(name))
        assert_same_bits(values(again), values(converters.load(reference.checkpoint(name), config=FACTS.get(name))))
    assert len(list(tmp_path.iterdir())) == len(OFFICIAL + INTERPOLATED)


def test_group_norm_has_four_axes_as_published_or_one_as_flax_saves_it_today(tmp_path: Path) -> None:
    path = reference.checkpoint("hybrid_stem_only")
    tensors = reference.arrays(converters.save(converters.load(path), tmp_path / "saved.npz", format="google"))
    norms = {name for name in tensors if "gn_" in name}
    assert norms
    assert all(tensors[name].shape[:3] == (1, 1, 1) and tensors[name].ndim == 4 for name in norms)
    flat = {name: value.reshape(-1) if name in norms else value for name, value in tensors.items()}
    np.savez(tmp_path / "flat.npz", **flat)
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
