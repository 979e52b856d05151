#!/usr/bin/env bash
# Guess: get_or_create_collection(name, configuration={'hnsw': {'space': 'cosine'}}) gives a collection that
# measures by cosine, or raises if there is one with another metric.
# Fact: chromadb 1.5.9 returns the collection that is there, with squared Euclidean distance (the default of the
# first call), and reports nothing; metadata={'hnsw:space': ...} is the same.
# Why it matters: distances of 25 instead of 0.001, thresholds that match nothing, and another order where vectors
# are not of length 1. A new process with the right line of code does not mend it.
# Instead: look at collection.configuration['hnsw']['space'] after opening, and make the collection anew for another
# metric.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 chromadb==1.5.9
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import chromadb

print("chromadb", chromadb.__version__)
client = chromadb.EphemeralClient()
first = client.get_or_create_collection("pictures", embedding_function=None)
first.add(ids=["near in angle", "near in space"], embeddings=[[50.0, 60.0], [9.0, 14.0]])
asked = {"hnsw": {"space": "cosine"}}
for options in ({"configuration": asked}, {"metadata": {"hnsw:space": "cosine"}}):
    again = client.get_or_create_collection("pictures", embedding_function=None, **options)
    hit = again.query(query_embeddings=[[10.0, 12.0]], n_results=2)
    print(options, "->", again.configuration["hnsw"]["space"], hit["ids"][0], hit["distances"][0])
    assert again.configuration["hnsw"]["space"] == "l2", "the metric is changed or refused now"
    assert hit["ids"][0][0] == "near in space"
other = client.get_or_create_collection("other", embedding_function=None, configuration=asked)
other.add(ids=["near in angle", "near in space"], embeddings=[[50.0, 60.0], [9.0, 14.0]])
hit = other.query(query_embeddings=[[10.0, 12.0]], n_results=2)
print("a new collection:", other.configuration["hnsw"]["space"], hit["ids"][0])
assert hit["ids"][0][0] == "near in angle"
PY
