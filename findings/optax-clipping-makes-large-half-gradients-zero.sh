#!/usr/bin/env bash
# Guess: clip_by_global_norm(1.0) gives gradients of norm 1 whenever they are finite and larger.
# Fact: optax 0.2.8 sums the squares in the type of the gradients. 4,000 float16 gradients of 300 have a norm of
# 19,000, their squares overflow, the norm is infinite, and all gradients become exactly 0, without NaN.
# Why it matters: gradients under a loss scale of 2**15 are that large. The step is a step of the weight decay
# alone, the loss is finite, and checks for NaN or apply_if_finite see nothing.
# Instead: unscale and cast to float32 before clipping: jax.tree.map(lambda g: g.astype(jnp.float32), gradients).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import numpy as np
import optax

print("optax", optax.__version__)
clip = optax.clip_by_global_norm(1.0)


def clipped(value, dtype):
    gradients = {"kernel": jnp.full(4000, value, dtype)}
    assert bool(jnp.isfinite(gradients["kernel"]).all())
    result, _ = clip.update(gradients, clip.init(gradients))
    return float(np.linalg.norm(np.asarray(result["kernel"], np.float64)))


for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
    print(dtype.__name__, "norm after clipping:", {value: round(clipped(value, dtype), 3) for value in (3, 300)})
assert clipped(300, jnp.float16) == 0, "the norm is taken in float32 now"
assert abs(clipped(3, jnp.float16) - 1) < 0.01
assert abs(clipped(300, jnp.bfloat16) - 1) < 0.05
assert abs(clipped(300, jnp.float32) - 1) < 1e-3
PY
