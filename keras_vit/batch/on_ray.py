"""Compute output files on the nodes of a Ray cluster, with one model for each actor."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_vit._util.text import install_command
from keras_vit.batch.compute import Worker
from keras_vit.batch.folder import Folder
from keras_vit.model.vision_transformer import VisionTransformer

MODEL = "_model.keras"  # in the output folder, which all nodes share


class Actor:
    """A worker in a process of Ray's."""

    def __init__(self, folder: Folder, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._worker = Worker(keras.saving.load_model(folder.path / MODEL), **settings)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Write the files of these numbers that are not there; return the numbers of their images."""
        missing = [number for number in rows["item"].tolist() if not self._folder.file(number).exists()]
        return {"count": [sum(self._worker.run(self._folder, missing))]}


def run(model: VisionTransformer, settings: dict[str, Any], folder: Folder, numbers: Sequence[int]) -> Iterator[int]:
    """Write output files; yield the number of images in each. A file of a node that is lost is computed by another."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'engine="ray" needs the package ray: {install_command("ray")}') from error
    ray.init(ignore_reinit_error=True)
    path = folder.path / MODEL
    model.save(path)
    gpus, nodes = int(ray.cluster_resources().get("GPU", 0)), [node for node in ray.nodes() if node["Alive"]]
    resources = {"num_gpus": 1} if gpus else {"num_cpus": min(node["Resources"].get("CPU", 1) for node in nodes)}
    rows = ray.data.from_items(list(numbers), override_num_blocks=len(numbers)).map_batches(
        Actor, fn_constructor_args=(folder, settings), batch_size=1, concurrency=(1, gpus or len(nodes)), **resources
    )
    for row in rows.iter_rows():
        yield int(row["count"])
    path.unlink()
