"""Every method agrees with its library, and with embeddings that the official code has resized.

`data/position.npz` has tiny random embeddings ("<case>/source") and the results ("<case>/<height>x<width>") of
google-research/vision_transformer's `load_pretrained` (interp_*; 3x5 is not square, so by the same zoom with
one factor per axis), big_vision's `resample_posemb` (bv_tok_rep), Hugging Face transformers
4.57.1's `interpolate_pos_encoding` (hf_cls_v4) and timm 1.0.31's `set_input_size` (timm_token).
"bv_gap_sincos" is what a big_vision model with `posemb="sincos2d"` added to its patches: tokens after the
embedding minus tokens before it.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_vit import position

DATA = Path(__file__).parent / "data" / "position.npz"

# The other library may compute in float32: a position on the grid then has an error of up to 28 patches x 6e-8,
# and the slope between two neighbouring normal values is below 10. In float64 this is 28 x 1e-16 x 10.
FLOAT32_NOISE = {"rtol": 0, "atol": 2e-5}
FLOAT64_NOISE = {"rtol": 0, "atol": 1e-13}

OFFICIAL_CASES = [
    ("interp_token", "6x6", "official", 1),
    ("interp_token", "3x3", "official", 1),
    ("interp_token", "3x5", "official", 1),
    ("interp_gap", "5x5", "official", 0),
    ("interp_prelogits_drop", "5x5", "official", 1),
    ("bv_tok_rep", "6x6", "official", 0),
    ("hf_cls_v4", "6x6", "bicubic", 1),
    ("hf_cls_v4", "3x5", "bicubic", 1),
    ("timm_token", "6x6", "bicubic-antialias", 1),
    ("timm_token", "3x5", "bicubic-antialias", 1),
]
# (source grid, target grid): larger, smaller, one of each, equal numbers of patches, sides of one patch.
GRIDS = [
    ((14, 14), (24, 24)),
    ((24, 24), (14, 14)),
    ((7, 7), (12, 5)),
    ((6, 9), (11, 4)),
    ((4, 4), (2, 8)),
    ((3, 5), (1, 7)),
    ((3, 5), (6, 1)),
    ((1, 4), (3, 9)),
    ((1, 1), (2, 3)),
    ((5, 2), (1, 1)),
    ((28, 3), (2, 28)),
]


def patches(grid, hidden=3, dtype=np.float64):
    """Return normal random numbers, (height, width, hidden)."""
    return np.random.default_rng(7).standard_normal((*grid, hidden)).astype(dtype)


def resize_patches(values, target, method):
    """Call `position.resize` for an array (height, width, hidden)."""
    height, width, hidden = values.shape
    flat = values.reshape(1, height * width, hidden)
    resized = position.resize(flat, target, source_grid=(height, width), prefix_tokens=0, method=method)
    return resized.reshape(*target, hidden)


def zoom(values, target, **kwargs):
    factors = [new / old for new, old in zip(target, values.shape, strict=False)]
    return scipy.ndimage.zoom(values, (*factors, 1), order=1, **kwargs)


@pytest.mark.parametrize(("case", "target", "method", "prefix_tokens"), OFFICIAL_CASES)
def test_resized_embeddings_equal_those_of_the_official_code(case, target, method, prefix_tokens):
    with np.load(DATA) as data:
        source, expected = data[f"{case}/source"], data[f"{case}/{target}"]
    grid = tuple(map(int, target.split("x")))
    resized = position.resize(source, grid, prefix_tokens=prefix_tokens, method=method)
    assert resized.dtype == expected.dtype
    # SciPy computes in float64 like us: one float32 rounding of values below 2. The others compute in float32,
    # on grids of up to 6: sums of 16 products at rounded positions.
    tolerance = {"rtol": 0, "atol": 2e-7} if method == "official" else {"rtol": 0, "atol": 3e-6}
    np.testing.assert_allclose(resized, expected, **tolerance)


@pytest.mark.parametrize(("source", "target"), GRIDS)
def test_official_is_scipy_zoom_of_order_one(source, target):
    values = patches(source)
    np.testing.assert_allclose(resize_patches(values, target, "official"), zoom(values, target), **FLOAT64_NOISE)


@pytest.mark.parametrize("old", [1, 2, 7, 8, 14, 16, 24, 28, 32])
def test_official_is_scipy_zoom_for_every_target(old):
    values = patches((old, 2))
    for new in range(1, 65):
        expected = zoom(values, (new, 2))
        np.testing.assert_allclose(resize_patches(values, (new, 2), "official"), expected, **FLOAT64_NOISE)


def test_official_zeroes_the_last_row_and_column_where_scipy_does():
    values = patches((28, 28))
    expected = zoom(values, (48, 48))
    assert not expected[-1].any() and not expected[:, -1].any()
    np.testing.assert_allclose(resize_patches(values, (48, 48), "official"), expected, **FLOAT64_NOISE)


@pytest.mark.parametrize(("source", "target"), GRIDS)
def test_bilinear_is_tensorflow_image_resize(source, target):
    import tensorflow as tf

    values = patches(source, dtype=np.float32)
    expected = tf.image.resize(values, target, method="bilinear", antialias=False).numpy()
    np.testing.assert_allclose(resize_patches(values, target, "bilinear"), expected, **FLOAT32_NOISE)


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32_NOISE), ("float64", FLOAT64_NOISE)])
@pytest.mark.parametrize(
    ("method", "mode", "antialias"),
    [
        ("bilinear", "bilinear", False),
        ("bicubic", "bicubic", False),
        ("bicubic-antialias", "bicubic", True),
    ],
)
@pytest.mark.parametrize(("source", "target"), GRIDS)
def test_half_pixel_methods_are_torch_interpolate(source, target, method, mode, antialias, dtype, tolerance):
    torch = pytest.importorskip("torch")
    values = patches(source, dtype=dtype)
    # PyTorch 2.13's antialiasing repeats the first row of images one pixel wide, so these are transposed first.
    axes, size = ((2, 1, 0), target[::-1]) if target[1] == 1 else ((2, 0, 1), target)
    images = torch.from_numpy(values).permute(axes)[None]
    resized = torch.nn.functional.interpolate(images, size=size, mode=mode, align_corners=False, antialias=antialias)
    expected = resized[0].permute(np.argsort(axes).tolist()).numpy()
    np.testing.assert_allclose(resize_patches(values, target, method), expected, **tolerance)


@pytest.mark.parametrize("method", position.METHODS)
@pytest.mark.parametrize("prefix_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_prefix_rank_and_dtype_are_kept(method, prefix_tokens, rank, dtype):
    prefix = patches((1, prefix_tokens), dtype=dtype)[0]
    values = patches((2, 6), dtype=dtype)
    embedding = np.concatenate([prefix, values.reshape(12, 3)])
    embedding = embedding[None] if rank == 3 else embedding
    resized = position.resize(embedding, (3, 4), source_grid=(2, 6), prefix_tokens=prefix_tokens, method=method)
    assert (resized.dtype, resized.ndim) == (embedding.dtype, rank)
    rows = resized.reshape(-1, 3)
    np.testing.assert_array_equal(rows[:prefix_tokens], prefix)
    in_float64 = resize_patches(values.astype(np.float64), (3, 4), method)
    np.testing.assert_array_equal(rows[prefix_tokens:], in_float64.reshape(12, 3).astype(dtype))


@pytest.mark.parametrize("method", position.METHODS)
@pytest.mark.parametrize(("grid", "source_grid"), [(4, None), ((4, 4), None), ([2, 8], (2, 8)), (4, 4)])
def test_the_same_grid_gives_a_copy_bit_for_bit(method, grid, source_grid):
    embedding = patches((1, 17), dtype=np.float32)
    embedding[0, 3] = [np.nan, -0.0, 1e-45]
    resized = position.resize(embedding, grid, source_grid=source_grid, method=method)
    assert resized.tobytes() == embedding.tobytes()
    assert not np.shares_memory(resized, embedding)


def test_one_number_means_a_square():
    embedding = patches((1, 10))
    squares = position.resize(embedding, 5), position.resize(embedding, (5, 5), source_grid=3)
    np.testing.assert_array_equal(*squares)


def test_as_many_patches_in_another_shape_are_interpolated():
    embedding = patches((1, 16))
    resized = position.resize(embedding, (2, 8), prefix_tokens=0)
    assert resized.shape == embedding.shape
    assert np.abs(resized - embedding).max() > 0.1


def test_non_finite_values_pass_through():
    values = patches((3, 3))
    values[1, 1, 0] = np.nan
    resized = resize_patches(values, (5, 5), "bilinear")
    assert np.isnan(resized[..., 0]).any()
    assert np.isfinite(resized[..., 1:]).all()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 17, 3), {"grid": 0}, r"grid must .* 1 or more\. Received: 0"),
        ((1, 17, 3), {"grid": (4, -1)}, r"Received: \(4, -1\)"),
        ((1, 17, 3), {"grid": (4, 4, 3)}, r"Received: \(4, 4, 3\)"),
        ((1, 17, 3), {"grid": 4.5}, r"must be an integer .* Received: 4\.5"),
        ((1, 17, 3), {"source_grid": (0, 16)}, r"source_grid must .* Received: \(0, 16\)"),
        ((1, 17, 3), {"prefix_tokens": -1}, r"prefix_tokens must be an integer >= 0\. Received: -1"),
        ((17,), {}, r"\(1, tokens, hidden\) or \(tokens, hidden\)\. Received: \(17,\)"),
        ((2, 17, 3), {}, r"Received: \(2, 17, 3\)"),
        ((1, 1, 17, 3), {}, r"Received: \(1, 1, 17, 3\)"),
        ((1, 16, 3), {}, r"16 tokens less prefix_tokens=1 .* pass source_grid=.* shape \(1, 16, 3\)"),
        ((17, 3), {"source_grid": (3, 5)}, r"17 tokens less prefix_tokens=1 do not fill source_grid=\(3, 5\)"),
        ((1, 1, 3), {}, r"1 tokens less prefix_tokens=1 do not fill a square"),
        ((1, 3, 3), {"prefix_tokens": 5}, r"3 tokens less prefix_tokens=5 do not fill a square"),
        ((1, 17, 3), {"method": "area"}, r"official, bilinear, .*bicubic-antialias\. Received: 'area'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(shape, options, message):
    with pytest.raises(ValueError, match=message):
        position.resize(np.zeros(shape, np.float32), **{"grid": 6, **options})


def test_integers_are_refused_rather_than_truncated():
    with pytest.raises(TypeError, match="Received dtype: int64"):
        position.resize(np.zeros((1, 17, 3), np.int64), 6)


sides = st.integers(1, 9)
grids = st.tuples(sides, sides)
methods = st.sampled_from(position.METHODS)
# No deadline, because a busy machine may delay any example.
unhurried = settings(deadline=None, max_examples=60)


@unhurried
@given(source=grids, target=grids, method=methods, value=st.floats(-100, 100))
def test_constants_stay_constant(source, target, method, value):
    resized = resize_patches(np.full((*source, 2), value), target, method)
    np.testing.assert_allclose(resized, value, rtol=1e-13, atol=1e-13)


@unhurried
@given(source=grids, target=grids, slopes=st.tuples(st.floats(-9, 9), st.floats(-9, 9)))
def test_official_keeps_a_linear_ramp_and_its_corners(source, target, slopes):
    def ramp(grid):
        # A side of one patch, in source or target, takes the first value.
        ends = [(side > 1) * (old - 1) for side, old in zip(grid, source, strict=True)]
        y, x = (np.linspace(0, end, side) for end, side in zip(ends, grid, strict=True))
        return (slopes[0] * y[:, None] + slopes[1] * x)[..., None]

    np.testing.assert_allclose(resize_patches(ramp(source), target, "official"), ramp(target), rtol=0, atol=1e-12)


@unhurried
@given(source=grids, target=grids, method=methods)
def test_transposing_the_grid_commutes_with_resizing(source, target, method):
    values = patches(source)
    transposed = resize_patches(values.swapaxes(0, 1), target[::-1], method)
    np.testing.assert_allclose(transposed.swapaxes(0, 1), resize_patches(values, target, method), **FLOAT64_NOISE)


def test_sincos2d_is_what_big_vision_adds_to_its_patches():
    with np.load(DATA) as data:
        added = data["bv_gap_sincos/4x4"]
    embedding = position.sincos2d(4, 32)
    assert (embedding.dtype, embedding.shape) == (np.float32, (1, 16, 32))
    # The difference of two float32 values below 3 has their rounding errors, 2 x 1.2e-7.
    np.testing.assert_allclose(embedding, added, rtol=0, atol=3e-7)


@pytest.mark.parametrize(
    ("grid", "hidden", "temperature"), [((2, 3), 8, 10_000.0), ((5, 1), 12, 100.0), ((14, 14), 384, 10_000.0)]
)
def test_sincos2d_follows_its_formula_one_number_at_a_time(grid, hidden, temperature):
    height, width = grid
    quarter = hidden // 4
    expected = np.empty((1, height * width, hidden))
    for token in range(height * width):
        row, column = divmod(token, width)
        for k in range(quarter):
            frequency = 1.0 / temperature ** (k / (quarter - 1))
            waves = [f(place * frequency) for place in (column, row) for f in (math.sin, math.cos)]
            expected[0, token, k::quarter] = waves
    embedding = position.sincos2d(grid, hidden, temperature=temperature)
    # Float64 inside: only the final rounding to float32 of values up to 1.
    np.testing.assert_allclose(embedding, expected, rtol=0, atol=6e-8)


@pytest.mark.parametrize("hidden", [-8, 0, 4, 30])
def test_sincos2d_refuses_a_width_that_has_no_quarters(hidden):
    with pytest.raises(ValueError, match=f"multiple of 4, 8 or more. Received: {hidden}"):
        position.sincos2d(4, hidden)


def test_sincos2d_refuses_an_empty_grid():
    with pytest.raises(ValueError, match=r"Received: \(0, 4\)"):
        position.sincos2d((0, 4), 32)


def test_a_grid_may_be_an_array_and_bad_arguments_are_named() -> None:
    values = np.zeros((1, 17, 4), np.float32)
    assert position.resize(values, np.array([5, 4])).shape == (1, 21, 4)
    with pytest.raises(ValueError, match="an integer >= 0. Received: 1.0"):
        position.resize(values, 5, prefix_tokens=1.0)
    with pytest.raises(TypeError, match="complex64"):
        position.resize(values.astype(np.complex64), 5)
