#!/usr/bin/env bash
# Guess: jnp.asarray of int64 numbers above 2**31 raises or warns, as jnp.asarray(x, dtype='int64') does.
# Fact: JAX 0.10.2 without jax_enable_x64 keeps the lower 32 bits of NumPy's int64 and uint64, silently: 3,000,000,000
# becomes -1,294,967,296, and 2**40 + 1 becomes 1. A Python number of that size raises; a float of 3e9 becomes
# 2,147,483,647.
# Why it matters: image ids, time stamps in microseconds and perceptual hashes that travel with a batch come back as
# those of other pictures; on TensorFlow the same Keras code keeps them.
# Instead: keep ids in NumPy beside the batch, or as two 32 bit halves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
ids = np.array([7, 3_000_000_000, 2**40 + 1])
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    batch = jax.device_put({"id": ids, "hash": np.array([2**63 + 5], np.uint64)})
    converted = jnp.asarray(ids)
print("ids", ids.tolist(), "->", converted.tolist(), converted.dtype, "warnings:", len(told))
print("hash", 2**63 + 5, "->", batch["hash"].tolist(), batch["hash"].dtype)
assert not told and converted.tolist() == [7, -1294967296, 1] == batch["id"].tolist(), "JAX tells or keeps them now"
assert batch["hash"].tolist() == [5]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    jnp.asarray(ids, dtype="int64")
assert told, "an explicit int64 is not told now"
PY
