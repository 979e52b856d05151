"""Every method agrees with its library, and with embeddings that the official code has resized.

`data/position.npz` has tiny random embeddings ("<case>/source") and the results ("<case>/<height>x<width>") of
google-research/vision_transformer's `load_pretrained` (interp_*; 3x5 is not square, so by the same zoom with
one factor per axis), big_vision's `resample_posemb` (bv_tok_rep), Hugging Face transformers
4.57.1's `interpolate_pos_encoding` (hf_cls_v4) and timm 1.0.31's `set_input_size` (timm_token).
"bv_gap_sincos" is what a big_vision model with `posemb="sincos2d"` added to its patches: tokens after the
embedding minus tokens before it.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_vit import position
from places import DATA

DATA = DATA / "position.npz"

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


def test_official_is_scipy_zoom_of_order_one():
    for source, target in GRIDS:
        values = patches(source)
        expected = zoom(values, target)
        np.testing.assert_allclose(resize_patches(values, target, "official"), expected, **FLOAT64_NOISE)
    for old in (1, 2, 7, 8, 14, 16, 24, 28, 32):
        values = patches((old, 2))
        for new in range(1, 65):
            expected = zoom(values, (new, 2))
            np.testing.assert_allclose(resize_patches(values, (new, 2), "official"), expected, **FLOAT64_NOISE)


def test_official_zeroes_the_last_row_and_column_where_scipy_does():
    values = patches((28, 28))
    expected = zoom(values, (48, 48))
    assert not expected[-1].any() and not expected[:, -1].any()
    np.testing.assert_allclose(resize_patches(values, (48, 48), "official"), expected, **FLOAT64_NOISE)


def test_bilinear_is_tensorflow_image_resize():
    import tensorflow as tf

    for source, target in GRIDS:
        values = patches(source, dtype=np.float32)
        for method, antialias in (("bilinear", False), ("bilinear-antialias", True)):
            expected = tf.image.resize(values, target, method="bilinear", antialias=antialias).numpy()
            np.testing.assert_allclose(resize_patches(values, target, method), expected, **FLOAT32_NOISE)


@pytest.mark.torch
@pytest.mark.parametrize("method", ["bilinear", "bicubic", "bicubic-antialias"])
def test_half_pixel_methods_are_torch_interpolate(method):
    torch = pytest.importorskip("torch")
    mode, _, antialias = method.partition("-")
    for source, target in GRIDS:
        # PyTorch 2.13's antialiasing repeats the first row of images one pixel wide, so these are transposed first.
        axes, size = ((2, 1, 0), target[::-1]) if target[1] == 1 else ((2, 0, 1), target)
        for dtype, tolerance in (("float32", FLOAT32_NOISE), ("float64", FLOAT64_NOISE)):
            values = patches(source, dtype=dtype)
            images = torch.from_numpy(values).permute(axes)[None]
            resized = torch.nn.functional.interpolate(
                images, size=size, mode=mode, align_corners=False, antialias=bool(antialias)
            )
            expected = resized[0].permute(np.argsort(axes).tolist()).numpy()
            np.testing.assert_allclose(resize_patches(values, target, method), expected, **tolerance)


def test_prefix_rank_and_dtype_are_kept():
    combinations = itertools.product(position.METHODS, (0, 1, 2, 5), (2, 3), ("float16", "float32", "float64"))
    for method, prefix_tokens, rank, dtype in combinations:
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


def test_the_same_grid_gives_a_copy_bit_for_bit_and_another_of_its_area_is_interpolated():
    embedding = patches((1, 17), dtype=np.float32)
    embedding[0, 3] = [np.nan, -0.0, 1e-45]
    grids = [(4, None), ((4, 4), None), ([2, 8], (2, 8)), (4, 4)]
    for method, (grid, source_grid) in itertools.product(position.METHODS, grids):
        resized = position.resize(embedding, grid, source_grid=source_grid, method=method)
        assert resized.tobytes() == embedding.tobytes()
        assert not np.shares_memory(resized, embedding)
    square = patches((1, 16))
    resized = position.resize(square, (2, 8), prefix_tokens=0)
    assert resized.shape == square.shape
    assert np.abs(resized - square).max() > 0.1


def test_one_number_means_a_square_and_a_grid_may_be_an_array():
    embedding = patches((1, 10))
    squares = [position.resize(embedding, grid, source_grid=3) for grid in (5, (5, 5), np.array([5, 5]))]
    np.testing.assert_array_equal(squares[0], squares[1])
    np.testing.assert_array_equal(squares[0], squares[2])


def test_non_finite_values_pass_through():
    values = patches((3, 3))
    values[1, 1, 0] = np.nan
    resized = resize_patches(values, (5, 5), "bilinear")
    assert np.isnan(resized[..., 0]).any()
    assert np.isfinite(resized[..., 1:]).all()


WRONG = [  # a part of the message, the options, and the shape of the embedding
    *(("grid", {"grid": grid}, (1, 17, 3)) for grid in (0, (4, -1), (4, 4, 3), 4.5)),
    ("source_grid", {"source_grid": (0, 16)}, (1, 17, 3)),
    ("source_grid", {"source_grid": (3, 5)}, (17, 3)),
    *(("prefix_tokens", {"prefix_tokens": number}, (1, 17, 3)) for number in (-1, 1.0)),
    ("prefix_tokens", {"prefix_tokens": 5}, (1, 3, 3)),
    *((r"\(tokens, hidden\)", {}, shape) for shape in ((17,), (2, 17, 3), (1, 1, 17, 3))),
    ("pass source_grid", {}, (1, 16, 3)),
    ("do not fill a square", {}, (1, 1, 3)),
    ("official, bilinear", {"method": "area"}, (1, 17, 3)),
]


def test_what_does_not_fit_is_refused_by_name():
    for message, options, shape in WRONG:
        with pytest.raises(ValueError, match=message):
            position.resize(np.zeros(shape, np.float32), **{"grid": 6, **options})
    for dtype in ("int64", "complex64"):
        with pytest.raises(TypeError, match=dtype):
            position.resize(np.zeros((1, 17, 3), dtype), 6)
    for hidden in (-8, 0, 4, 30):
        with pytest.raises(ValueError, match="multiple of 4"):
            position.sincos2d(4, hidden)
    with pytest.raises(ValueError, match="grid"):
        position.sincos2d((0, 4), 32)


sides = st.integers(1, 9)
grids = st.tuples(sides, sides)
methods = st.sampled_from(position.METHODS)
few = settings(max_examples=40)


@few
@given(source=grids, target=grids, method=methods, value=st.floats(-100, 100))
def test_constants_stay_constant(source, target, method, value):
    resized = resize_patches(np.full((*source, 2), value), target, method)
    np.testing.assert_allclose(resized, value, rtol=1e-13, atol=1e-13)


@few
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


def test_sincos2d_follows_its_formula_one_number_at_a_time():
    for (height, width), hidden, temperature in (((2, 3), 8, 10_000.0), ((5, 1), 12, 100.0), ((14, 14), 96, 10_000.0)):
        quarter = hidden // 4
        expected = np.empty((1, height * width, hidden))
        for token in range(height * width):
            row, column = divmod(token, width)
            for k in range(quarter):
                frequency = 1.0 / temperature ** (k / (quarter - 1))
                waves = [f(place * frequency) for place in (column, row) for f in (math.sin, math.cos)]
                expected[0, token, k::quarter] = waves
        embedding = position.sincos2d((height, width), hidden, temperature=temperature)
        # Float64 inside: only the final rounding to float32 of values up to 1.
        np.testing.assert_allclose(embedding, expected, rtol=0, atol=6e-8)
