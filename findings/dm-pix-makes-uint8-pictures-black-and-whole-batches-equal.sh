#!/usr/bin/env bash
# Guess: dm_pix takes uint8 or says that it wants floats, and random_flip_left_right decides for each picture of a
# batch.
# Fact: dm-pix 0.4.5 casts the weights of rgb_to_grayscale to the picture's type: of uint8 they are 0, and so is the
# result. adjust_brightness of uint8 adds 0, and adjust_gamma makes everything 1. One key flips the whole batch or
# none of it.
# Why it matters: an input pipeline in JAX runs on black pictures, or augments half as much as planned.
# Instead: x / 255 first, and jax.vmap over jax.random.split(key, n).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 dm-pix==0.4.5
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import importlib.metadata

import dm_pix
import jax
import jax.numpy as jnp

print("dm-pix", importlib.metadata.version("dm-pix"), "jax", jax.__version__)
picture = jnp.full((2, 2, 3), 200, jnp.uint8)
grey, right = (dm_pix.rgb_to_grayscale(x)[0, 0, 0].item() for x in (picture, picture / 255))
brighter = dm_pix.adjust_brightness(picture, 0.1)[0, 0, 0].item()
print(f"grey of uint8 {picture[0, 0].tolist()}: {grey}; of its floats {right:.3f}; brighter by 0.1: {brighter}")
assert grey == 0 and brighter == 200, "uint8 is scaled or refused now"
assert abs(right - 200 / 255) < 1e-3
batch = jnp.arange(64.0).reshape(16, 2, 2, 1)


def share(flip):
    return [float(jnp.mean(flip(jax.random.key(i)) != batch)) for i in range(6)]


together = share(lambda key: dm_pix.random_flip_left_right(key, batch))
each = share(lambda key: jax.vmap(dm_pix.random_flip_left_right)(jax.random.split(key, 16), batch))
print("share of flipped pictures by key:", together, "with vmap:", each)
assert set(together) == {0, 1}, "pictures are flipped one by one now"
assert all(0 < value < 1 for value in each)
PY
