#!/usr/bin/env bash
# Guess: for a column of fixed-size lists, column.values.to_numpy().reshape(-1, n) gives the matrix of its rows,
# also after slice, and flatten() is the same.
# Fact: pyarrow 26.0.1: values of a slice are the numbers of the whole array, so rows 2 and 3 come back as rows 0 to
# 4. flatten() respects the slice and leaves out null rows, so that every row after a null moves up by one.
# Why it matters: embeddings read from Parquet in batches, or with a picture that could not be read, get the ids of
# other pictures; shapes fit whenever n divides the count.
# Instead: flatten() after drop_null of the whole table, or fill nulls first; check len(matrix) == len(column).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import pyarrow

print("pyarrow", pyarrow.__version__, "numpy", np.__version__)
numbers = np.arange(20, dtype=np.float32)
vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(numbers), 4)
part = vectors.slice(2, 2)
by_values = part.values.to_numpy().reshape(-1, 4)
by_flatten = part.flatten().to_numpy().reshape(-1, 4)
print("rows 2 and 3 by values:", by_values[:, 0].tolist(), "by flatten:", by_flatten[:, 0].tolist())
assert len(by_values) == 5 and by_values[0, 0] == 0, "values respects the slice now"
assert by_flatten[:, 0].tolist() == [8, 12]
gap = pyarrow.array([[1, 2], None, [5, 6]], pyarrow.list_(pyarrow.float32(), 2))
moved = gap.flatten().to_numpy().reshape(-1, 2)
print("three rows with a null by flatten:", moved.tolist())
assert len(gap) == 3 and moved.tolist() == [[1, 2], [5, 6]], "flatten keeps the place of a null now"
PY
