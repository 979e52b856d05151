"""Compute output files on the nodes of a Ray cluster, with one model for each actor."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_vit._util.text import install_command
from keras_vit.batch.compute import Worker
from keras_vit.batch.folder import Folder
from keras_vit.model.vision_transformer import VisionTransformer

MODEL = "_model.keras"  # in the output folder, which all nodes share


class _Actor:
    def __init__(self, folder: Folder, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._worker = Worker(keras.saving.load_model(folder.path / MODEL), **settings)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"images": [sum(self._worker.run(self._folder, [number])) for number in rows["item"].tolist()]}


def run_on_ray(model: VisionTransformer, settings: dict[str, Any], folder: Folder, numbers: Sequence[int]) -> Iterator[int]:
    """Write output files; yield the number of images in each. Other nodes finish the files of a lost one."""
    ray = import_ray()
    ray.init(ignore_reinit_error=True)
    model.save(folder.path / MODEL)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    nodes = [node for node in ray.nodes() if node["Alive"]]
    resources = {"num_gpus": 1} if gpus else {"num_cpus": min(node["Resources"].get("CPU", 1) for node in nodes)}
    files = ray.data.from_items(list(numbers), override_num_blocks=len(numbers))
    arguments = {"fn_constructor_args": (folder, settings), "concurrency": (1, gpus or len(nodes))}
    for row in files.map_batches(_Actor, batch_size=1, **arguments, **resources).iter_rows():
        yield int(row["images"])


def import_ray() -> Any:
    """Return the package ray, or raise an ImportError with the command that installs it."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'engine="ray" needs the package ray: {install_command("ray")}') from error
    return ray
