"""The position embeddings of the paper's ablation (appendix D.4) agree with a whole model in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special

from keras_vit.model.layers.position_variants import RelativePosition
from keras_vit.model.vision_transformer import VisionTransformer
from marks import full_except
from model_weights import values
from tiny_models import VARIANTS, built, prepared, tiny

ABLATION: dict[str, dict[str, Any]] = {
    "none": {"position": "none"},
    "1-D": {},
    **{name: changes for name, changes in VARIANTS.items() if "positions" in name},
    "2-D shared": {"position": "learned2d", "position_place": "shared"},
    "1-D, registers": {"num_registers": 2, "position_place": "blocks"},
    "2-D, registers, no class token": {"classifier": "gap", "num_registers": 2, "position": "learned2d"},
    "2-D on patches only": {"position": "learned2d", "position_prefix": False},
    "relative, distilled": {"position": "relative", "position_place": "blocks", "num_registers": 2},
    "relative, no class token": {"position": "relative", "position_place": "shared", "classifier": "gap"},
    "biases": {"relative_bias": "blocks", "num_registers": 2},
    "biases beside positions at every block": {"relative_bias": "shared", "position_place": "blocks"},
    "biases of one MLP, no class token": {
        **{"position": "none", "relative_bias": "shared", "relative_bias_mlp_dim": 6, "classifier": "gap"},
    },
    "biases of MLPs": {"position": "none", "relative_bias": "blocks", "relative_bias_mlp_dim": 6},
}
WIDE: dict[str, Any] = {"image_size": (16, 40)}  # height and width differ, so that they cannot be exchanged
RELATIVE: dict[str, Any] = {"position": "relative", "position_place": "blocks"}


# ---- the model in float64 NumPy; positions are computed token by token


def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return scaled * w[f"{name}/gamma"] + w[f"{name}/beta"]


def positions(w: dict[str, np.ndarray], config: Any, name: str, prefix: int) -> np.ndarray:
    """Return the embedding of every token: prefix tokens, then patches row by row."""
    if config.position == "learned":
        return w[f"{name}/embedding"][0]
    x, y = w[f"{name}/x_embedding"][0], w[f"{name}/y_embedding"][0]
    rows = [np.concatenate([x[p], y[p]]) for p in range(prefix)]
    for i in range(config.grid[0]):
        rows += [np.concatenate([x[prefix + j], y[prefix + i]]) for j in range(config.grid[1])]
    return np.stack(rows)


def biases(w: dict[str, np.ndarray], config: Any, name: str) -> np.ndarray:
    """Return what is added to the scores, (heads, queries, keys), pair by pair (BEiT; timm's RelPosMlp)."""
    prefix, (height, width), heads = config.num_prefix_tokens, config.grid, config.num_heads
    result = np.zeros((heads, config.num_tokens, config.num_tokens))
    for q, k in np.ndindex(result.shape[1:]):
        (yq, xq), (yk, xk) = (divmod(token - prefix, width) for token in (q, k))
        y, x = yq - yk, xq - xk
        if config.relative_bias_mlp_dim is None:
            kinds = {(False, False): (y + height - 1) * (2 * width - 1) + x + width - 1}
            kinds |= {(True, False): -3, (False, True): -2, (True, True): -1}
            result[:, q, k] = w[f"{name}/table"][kinds[q < prefix, k < prefix]]
        elif min(q, k) >= prefix:
            offset = np.array([np.sign(y) * np.log(1 + abs(y)), np.sign(x) * np.log(1 + abs(x))])
            hidden = np.maximum(offset @ w[f"{name}/dense1/kernel"] + w[f"{name}/dense1/bias"], 0)
            result[:, q, k] = hidden @ w[f"{name}/dense2/kernel"] + w[f"{name}/dense2/bias"]
    return result


def attention(
    x: np.ndarray, w: dict[str, np.ndarray], block: str, table: np.ndarray | None, bias: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    """Compute attention as in the paper's appendix A, head by head, and pair by pair for relative positions."""
    parts = {name: (w[f"{block}/attention/{name}/kernel"], w[f"{block}/attention/{name}/bias"]) for name in "qkv"}
    tokens, (_, heads, size) = x.shape[1], parts["q"][0].shape
    output, maps = np.zeros_like(x) + w[f"{block}/attention/out/bias"], []
    for head in range(heads):
        q, k, v = (x @ kernel[:, head] + bias[head] for kernel, bias in parts.values())
        scores = q @ k.swapaxes(1, 2)
        for i in range(tokens if table is not None else 0):
            for j in range(tokens):
                scores[:, i, j] += q[:, i] @ table[i - j + tokens - 1, head]  # type: ignore[index]
        scores = scores / np.sqrt(size) + (0 if bias is None else bias[head])
        maps.append(scipy.special.softmax(scores, axis=-1))
        output += maps[-1] @ v @ w[f"{block}/attention/out/kernel"][head]
    return output, np.stack(maps, axis=1)


def in_numpy(model: VisionTransformer, images: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits and the attention maps."""
    c = model.config
    w = {path: np.array(value, np.float64) for path, value in values(model).items()}
    w |= {path.replace(f"/{name}/", f"/{name[0]}/"): w[path] for path in w for name in ("query", "key", "value")}
    (height, width), side = c.grid, 8
    patches = images[:, : height * side, : width * side].reshape(-1, height, side, width, side, 3)
    x = np.einsum("bhiwjc,ijcd->bhwd", patches, w["embedding/kernel"]).reshape(len(images), height * width, -1)
    x = x + w["embedding/bias"]
    front = [w[f"prefix/{name}"] for name in ("cls", "registers") if f"prefix/{name}" in w]
    added = c.position not in ("none", "relative")
    if added and c.position_place == "stem" and not c.position_prefix:
        x = x + positions(w, c, "position", 0)
    x = np.concatenate([np.repeat(token, len(images), axis=0) for token in front] + [x], axis=1)
    if added and c.position_place == "stem" and c.position_prefix:
        x = x + positions(w, c, "position", c.num_prefix_tokens)
    maps = []
    for i in range(c.num_layers):
        name, table = "position" if c.position_place == "shared" else f"position_{i}", None
        if added and c.position_place != "stem":
            x = x + positions(w, c, name, c.num_prefix_tokens)
        if c.position == "relative":
            table = w[f"{name}/relative_embedding"]
        name = "relative_bias" if c.relative_bias == "shared" else f"relative_bias_{i}"
        bias = None if c.relative_bias == "none" else biases(w, c, name)
        attended, weights = attention(norm(x, w, f"block_{i}/norm1"), w, f"block_{i}", table, bias)
        maps.append(weights)
        x = x + attended
        inner = norm(x, w, f"block_{i}/norm2") @ w[f"block_{i}/mlp/dense1/kernel"] + w[f"block_{i}/mlp/dense1/bias"]
        inner = inner / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + inner @ w[f"block_{i}/mlp/dense2/kernel"] + w[f"block_{i}/mlp/dense2/bias"]
    x = norm(x, w, "encoder_norm")
    pooled = x[:, 0] if c.classifier == "token" else x[:, c.num_prefix_tokens :].mean(1)
    return pooled @ w["head/kernel"] + w["head/bias"], maps


@pytest.mark.parametrize("name", ABLATION)
def test_every_variant_is_the_model_in_numpy(name: str) -> None:
    model = built("float64", **WIDE, **ABLATION[name])
    images = prepared(model.config).astype(np.float64)
    logits, maps = in_numpy(model, images)
    # float64 rounds at 1e-16; sums of 64 products in two blocks, amplified by norms and softmax, stay below this.
    assert np.abs(np.array(model(images)) - logits).max() <= 1e-12 * np.abs(logits).max()
    for got, want in zip(model.attention_maps(images), maps, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    # Whole patches are exchanged: without positions they are a bag.
    difference = np.abs(np.array(model(np.roll(images, 8, axis=1))) - logits).max()
    assert (difference < 1e-12 * np.abs(logits).max()) if name == "none" else (difference > 1e-3)


# Name of the variant: numbers of weights in its layers
COUNTS: dict[str, dict[str, int]] = {
    "none": {},
    "1-D": {"position": 17 * 32},
    "2-D positions": {"position": 2 * 5 * 16},
    "2-D on patches only": {"position": 2 * 4 * 16},
    "positions at every block": {"position_0": 17 * 32, "position_1": 17 * 32},
    "shared positions": {"position": 17 * 32},
    "relative positions": {"position_0": 33 * 32, "position_1": 33 * 32},
    "shared relative positions": {"position": 33 * 32},
}


def test_a_variant_has_the_weights_that_the_paper_describes() -> None:
    for name, weights in COUNTS.items():
        model = VisionTransformer(tiny(**ABLATION[name]))
        layers = {layer.name: layer for layer in model.layers if layer.name.startswith("position")}
        assert {each: layer.count_params() for each, layer in layers.items()} == weights, name
        for layer in layers.values():
            for weight in layer.weights:  # 80 or more draws: the deviation has an error of 8 %; four times that
                assert np.std(weight) == pytest.approx(0.02, rel=0.32)


# ---- saving, and another resolution


def test_tables_of_columns_and_rows_are_interpolated_along_their_own_axis(tmp_path: Path) -> None:
    model = built(**WIDE, position="learned2d", position_place="blocks", num_registers=1)
    larger = model.resized((24, 80))
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = VisionTransformer(larger.config)
    loaded.load_weights(tmp_path / "model.weights.h5")
    before, after = values(model), values(larger)
    for path, value in values(loaded).items():
        np.testing.assert_array_equal(after[path], value)
    for name, (old, new) in {"x": (5, 10), "y": (2, 3)}.items():
        for block in (0, 1):
            table, got = (w[f"position_{block}/{name}_embedding"][0].astype(np.float64) for w in (before, after))
            assert got.shape == (2 + new, 16)
            np.testing.assert_array_equal(got[:2], table[:2])  # class token and register
            places = np.linspace(0, old - 1, new)
            want = [np.interp(places, np.arange(old), table[2:, channel]) for channel in range(16)]
            # rounded once to float32, values of size 1
            np.testing.assert_allclose(got[2:], np.transpose(want), rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras' warning, before its error
@pytest.mark.parametrize(
    ("name", "image_size"), [("relative positions", 48), ("shared relative positions", (16, 64))], ids=str
)
def test_relative_positions_of_another_grid_are_refused_until_they_start_anew(
    name: str, image_size: Any, tmp_path: Path
) -> None:
    model = built(**VARIANTS[name])
    with pytest.raises(ValueError, match=r"not interpolated: position.* grid of .*Received: \(4, 4\) and 1.*fresh"):
        model.resized(image_size)  # larger, or as many patches that are laid out otherwise
    config = model.config.replace(image_size=image_size)
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="not interpolated"):
        VisionTransformer(config).load_weights(tmp_path / "model.weights.h5")
    anew = [layer.name for layer in model.layers if isinstance(layer, RelativePosition)]
    other = model.with_config(config, fresh=anew)
    assert np.isfinite(other(prepared(config))).all()
    np.testing.assert_array_equal(model.resized((32, 32))(prepared(model.config)), model(prepared(model.config)))


def test_weights_of_another_kind_or_behind_other_prefix_tokens_are_refused() -> None:
    plane, shared = {"position": "learned2d"}, {"position_place": "shared"}
    relative = {"position": "relative", "position_place": "shared"}
    for saved, wanted in (({}, plane), (plane, {}), (shared, relative), (relative, shared)):
        with pytest.raises(ValueError, match="relative position has a|position embedding of kind"):
            VisionTransformer(tiny(**saved)).with_config(tiny(**wanted))
    with pytest.raises(ValueError, match=r"3 tokens in front. Received: \(4, 4\) and 1"):
        VisionTransformer(tiny(**RELATIVE)).with_config(tiny(**RELATIVE, num_registers=2), fresh=["prefix"])


LEARNT = ["2-D positions at every block", "shared relative positions"]


@pytest.mark.parametrize("name", full_except([LEARNT[0]], LEARNT))
def test_a_variant_learns_in_mixed_precision_and_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    model = VisionTransformer(tiny(**VARIANTS[name], num_layers=1), dtype="mixed_bfloat16")
    images, labels = prepared(model.config, 10), np.arange(10) % 5
    before = values(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss, run_eagerly=True)
    losses = model.fit(images, labels, batch_size=10, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    for path, value in values(model).items():
        assert value.dtype == np.float32
        assert not path.startswith("position") or np.any(value != before[path]), path
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(images), model(images))
