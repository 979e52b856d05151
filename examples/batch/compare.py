"""Compare the rows of Ray, Spark and Beam with those of one process, on 200 photos and 2 damaged files.

python examples/batch/compare.py ray             in an environment with ray: a cluster of two nodes, one is removed
python examples/batch/compare.py spark PYTHON    PYTHON has pyspark and tensorflow; Java
python examples/batch/compare.py beam PYTHON           PYTHON has apache-beam and tensorflow
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).parents[2] / "tests"))
import photo_folder  # noqa: E402

EXAMPLES = Path(__file__).parent
ROWS_PER_FILE = 8
# Of features of about 1: float32 in batches of other sizes.
TOLERANCE = 1e-4


def by_path(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows by the name of the image; an error if an image has two."""
    rows = pq.read_table(folder).to_pylist()
    found = {Path(row["path"]).name: row for row in rows}
    assert len(found) == len(rows)
    return found


def compare(want: Path, received: Path) -> None:
    """Raise an AssertionError if rows differ; print how far they are apart."""
    rows, others = by_path(want), by_path(received)
    assert rows.keys() == others.keys(), (len(rows), len(others))
    pairs = [(rows[name], others[name]) for name in rows]
    assert [row["error"] is None for row, _ in pairs] == [row["error"] is None for _, row in pairs]
    good = [(row["features"], other["features"]) for row, other in pairs if row["error"] is None]
    apart = max(np.abs(np.subtract(*pair)).max() for pair in good)
    print(f"{len(rows)} rows, {len(rows) - len(good)} with an error; features at most {apart:.1e} apart")
    assert apart < TOLERANCE


def run_ray(photos: Path, folder: Path) -> None:
    """Run on a cluster of two nodes besides the head; remove one of them when a third of the files is finished."""
    import ray
    from ray.cluster_utils import Cluster

    from keras_vit import batch

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    cluster.connect()
    removed = []

    def remove() -> None:
        while len(list((folder / "out").glob("part-*"))) < 8:
            time.sleep(0.05)
        removed.append(len(list((folder / "out").glob("part-*"))))
        cluster.remove_node(node, allow_graceful=False)

    threading.Thread(target=remove, daemon=True).start()
    start = time.perf_counter()
    print(batch.embed("digits", photos, to=folder / "out", engine="ray", **SETTINGS))
    print(f"{time.perf_counter() - start:.0f} s; a node was removed after {removed} files")
    assert removed
    ray.shutdown()
    cluster.shutdown()


def run_script(script: str, python: str, source: str, folder: Path) -> None:
    """Run an example in another environment."""
    from keras_vit import export, zoo

    export.saved_model(zoo.load("digits"), folder / "model")
    environment = {**os.environ, "PYTHONPATH": "", "PYSPARK_PYTHON": python, "TF_CPP_MIN_LOG_LEVEL": "3"}
    submit = [str(Path(python).with_name("spark-submit")), "--master", "local[2]"]
    start = submit if script.startswith("spark") else [python]
    command = [*start, str(EXAMPLES / script), str(folder / "model"), source, str(folder / "out" / "rows")]
    (folder / "out").mkdir()
    subprocess.run(command, env=environment, cwd=folder, check=True)


SETTINGS: dict[str, Any] = {"what": "features", "dtype": "float32", "batch_size": 8, "rows_per_file": ROWS_PER_FILE}

if __name__ == "__main__":
    from keras_vit import batch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = photo_folder.make(folder / "photos", per_class=40)
        (photos / "bad.jpg").write_bytes(b"no image")
        (photos / "cut.jpg").write_bytes(next(photos.rglob("*-00.jpg")).read_bytes()[:999])
        print(batch.embed("digits", photos, to=folder / "local", **SETTINGS))
        if sys.argv[1] == "ray":
            run_ray(photos, folder)
        else:
            source = {"spark": str(photos), "beam": f"{photos}/**.jpg"}[sys.argv[1]]
            run_script(f"{sys.argv[1]}_features.py", sys.argv[2], source, folder)
        compare(folder / "local", folder / "out")
