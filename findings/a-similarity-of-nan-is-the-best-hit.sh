#!/usr/bin/env bash
# Guess: sorting by similarity, highest first, puts NaN (the cosine of a zero vector) at the end.
# Fact: DuckDB 2.0.1 and polars 2.1.0 take NaN for the largest number: ORDER BY ... DESC, sort(descending=True) and
# top_k put it first, and so does np.argsort(x)[::-1]. pandas and pyarrow put it last, and so do max and arg_max of
# polars.
# Why it matters: A picture without features (black, unreadable) has a zero vector, and then is the best hit of
# every query. DuckDB's array_cosine_similarity gives NaN there, not NULL, so NULLS LAST does not help.
# Instead: drop zero vectors when they are stored, or filter: WHERE NOT isnan(similarity), is_not_nan(),
# np.argsort(-x).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 duckdb==2.0.1 polars==2.1.0 pandas==3.1.1 pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import duckdb
import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.compute

print("duckdb", duckdb.__version__, "polars", polars.__version__, "pandas", pandas.__version__)
rows = duckdb.sql("""
    SELECT id, array_cosine_similarity(vector, [1, 0, 0]::FLOAT[3]) AS similarity
    FROM (VALUES (1, [1, 0, 0]::FLOAT[3]), (2, [0, 0, 0]::FLOAT[3]), (3, [1, 1, 0]::FLOAT[3])) AS t(id, vector)
    ORDER BY similarity DESC NULLS LAST
""").fetchall()
print("DuckDB:", rows)
assert rows[0][0] == 2 and np.isnan(rows[0][1]), "the zero vector is not first now"
values = np.array([0.5, np.nan, 0.9])
frame = polars.DataFrame({"id": [0, 1, 2], "s": values})
first = {
    "polars sort": frame.sort("s", descending=True)["id"][0],
    "polars top_k": frame.top_k(1, by="s")["id"][0],
    "polars arg_max": frame["s"].arg_max(),
    "NumPy argsort reversed": int(np.argsort(values)[::-1][0]),
    "NumPy argsort of -x": int(np.argsort(-values)[0]),
    "pandas nlargest": int(pandas.Series(values).nlargest(1).index[0]),
    "pyarrow": pyarrow.compute.sort_indices(pyarrow.array(values), sort_keys=[("", "descending")])[0].as_py(),
}
for name, place in first.items():
    print(f"{name}: {values[place]} is first")
nan_first = {name for name, place in first.items() if place == 1}
assert nan_first == {"polars sort", "polars top_k", "NumPy argsort reversed"}, nan_first
PY
