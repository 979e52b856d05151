#!/usr/bin/env bash
# Guess: jax.ops.segment_sum accumulates bfloat16 in float32, as jnp.sum and jnp.mean do.
# Fact: JAX 0.10.2 adds in the type of the data. The sum of 4,000 bfloat16 ones of one class is 256 (of float16
# 2,048), while jnp.sum gives 4,000. x.at[labels].add is the same code.
# Why it matters: class means of embeddings (prototypes, k-means, linear probes by counts) shrink with the number of
# pictures; cosine similarity hides the length, but each later picture adds nothing.
# Instead: segment_sum(x.astype(jnp.float32), labels, n), or one_hot(labels).T @ x with
# preferred_element_type=float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

print("jax", jax.__version__, "on", jax.devices()[0].platform)
labels = jnp.zeros(4000, jnp.int32)
found = {}
for dtype in ("bfloat16", "float16", "float32"):
    ones = jnp.ones(4000, dtype)
    by_class = float(jax.ops.segment_sum(ones, labels, 1)[0])
    added = float(jnp.zeros(1, dtype).at[labels].add(ones)[0])
    found[dtype] = by_class
    print(f"{dtype}: jnp.sum {float(jnp.sum(ones))}, segment_sum {by_class}, at.add {added}")
    assert float(jnp.sum(ones)) == 4000 and added == by_class
assert found == {"bfloat16": 256, "float16": 2048, "float32": 4000}, "segment_sum widens now"
PY
