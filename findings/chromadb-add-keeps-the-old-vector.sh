#!/usr/bin/env bash
# Guess: collection.add with an id that is there raises, or replaces its vector.
# Fact: chromadb 1.5.9 does neither: it keeps the old vector and reports nothing, while new ids of the same call are
# stored. Only update and upsert replace.
# Why it matters: after a change of the model or of the preprocessing the same script runs again, prints the same
# counts, and the collection has old vectors for old pictures and new ones for new pictures, which cannot be
# compared.
# Instead: upsert, or a new collection whose name has the model's version.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 chromadb==1.5.9
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import chromadb
import numpy as np

print("chromadb", chromadb.__version__)
client = chromadb.EphemeralClient()
collection = client.create_collection("pictures", embedding_function=None)
collection.add(ids=["a"], embeddings=[[1.0, 2.0]])
collection.add(ids=["a", "b"], embeddings=[[5.0, 6.0], [7.0, 8.0]])
stored = collection.get(ids=["a", "b"], include=["embeddings"])["embeddings"]
print("after a second add of a:", np.asarray(stored).tolist())
assert np.array_equal(stored, [[1, 2], [7, 8]]), "add replaces or raises now"
collection.upsert(ids=["a"], embeddings=[[5.0, 6.0]])
stored = collection.get(ids=["a"], include=["embeddings"])["embeddings"]
print("after upsert of a:", np.asarray(stored).tolist())
assert np.array_equal(stored, [[5, 6]])
PY
