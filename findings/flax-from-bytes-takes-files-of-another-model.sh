#!/usr/bin/env bash
# Guess: flax.serialization.from_bytes(parameters, data) raises if the file has other shapes, other types, or
# tensors that the model has not.
# Fact: flax 0.12.8 checks only that no name of the target is missing: it returns arrays of the file's shapes and
# types, and drops what the target does not have.
# Why it matters: A head for 1000 classes lands in a model for 10, float16 in a float32 model, and 24 layers in a
# model of 12, of which half are thrown away; the last raises nowhere later either.
# Instead: compare jax.tree.map(lambda x: (x.shape, x.dtype), ...) of target and result, and the names of
# msgpack_restore(data) with the target's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import flax
import numpy as np
from flax import serialization

print("flax", flax.__version__, "numpy", np.__version__)
saved = {f"block_{i}": {"kernel": np.full((3, 4), i, np.float16)} for i in range(4)}
saved["head"] = {"kernel": np.zeros((4, 1000), np.float16)}
data = serialization.to_bytes(saved)
target = {f"block_{i}": {"kernel": np.zeros((3, 4), np.float32)} for i in range(2)}
target["head"] = {"kernel": np.zeros((4, 10), np.float32)}
read = serialization.from_bytes(target, data)
head = read["head"]["kernel"]
print("blocks in the file:", 4, "read:", sorted(read), "head:", head.shape, head.dtype)
assert sorted(read) == ["block_0", "block_1", "head"], "tensors that are left over are refused now"
assert read["head"]["kernel"].shape == (4, 1000), "another shape is refused now"
assert read["head"]["kernel"].dtype == np.float16, "types are converted now"
try:
    serialization.from_bytes({**target, "norm": np.zeros(4)}, data)
except ValueError as error:
    print("a missing name raises:", str(error)[:70])
else:
    raise AssertionError("a missing name is accepted now")
PY
