"""Begin a new run with the model of another one: `train.run(continue_from=...)`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_vit.dense.config import MapConfig
from keras_vit.dense.model import DenseModel
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import Data, DataRequest
from keras_vit.train.loop import checkpoints, storage
from keras_vit.zoo.pretrained import load_any, resolve


@dataclass(frozen=True)
class EarlierRun:
    """The run in a folder: its recipe, its arguments for the data, and its last model."""

    folder: str
    recipe: Recipe  # keeps the head
    data: dict[str, str]  # as `DataRequest.stored` returned them; {} if the data were arrays
    model: VisionTransformer | DenseModel
    teacher: str | None = None  # name or path

    def complete(self, request: DataRequest) -> DataRequest:
        """Return a request with the earlier run's arguments where it has none, unless it names other data."""
        if request.data is not None:
            return request
        if "data" not in self.data:
            raise ValueError(f"{self.folder} does not say where its data are: pass data, as for that run")
        defaults: Any = {name: value for name, value in self.data.items() if getattr(request, name) is None}
        return replace(request, **defaults)

    def check_classes(self, data: Data) -> None:
        """Raise a ValueError unless the head has as many classes as the data; `match_head` compares their names."""
        if self.model.task.num_classes not in (0, data.num_classes):
            raise ValueError(
                f"{self.folder} was trained for {self.model.task.num_classes} classes and {data.name} has "
                f"{data.num_classes}, so its head cannot be kept. For new classes, replace "
                f"continue_from={self.folder} by model={self.folder}/model.keras"
            )


def read_run(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None) -> EarlierRun:
    """Read the recipe and the last model of a run: `model.keras`, or the newest checkpoint of an unfinished run."""
    path = storage.plain_path(folder)
    if out is not None and Path(storage.plain_path(out)).resolve() == Path(path).resolve():
        raise ValueError(f"A new run needs its own folder: out must not be that of continue_from. Received: {path}")
    found = checkpoints.newest(f"{path}/checkpoints")
    if found is None:
        raise FileNotFoundError(
            f"There is no run to continue from. Expected a folder that keras_vit trained in. Received: {path}"
        )
    prefix, saved = found
    try:
        # The earlier run may have chosen its number of micro-batches on another machine.
        recipe = Recipe.from_dict(saved["facts"]["recipe"]).replace(accumulation="auto", reset_head=False)
        data = saved["facts"]["data"].get("arguments") or {}
        config = ViTConfig(**saved["facts"]["model"])
        head = MapConfig(**saved["facts"]["head"]) if "head" in saved["facts"] else None
        teacher = saved["facts"].get("teacher", {}).get("source")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{prefix} is not of a run that can be continued: {error}") from error
    if storage.is_local(path) and Path(path, "model.keras").exists():
        model = load_any(resolve(f"{path}/model.keras"), dtype="float32")
    else:
        model = _from_checkpoint(prefix, saved["variables"], config, head)
    return EarlierRun(path, recipe, data, model, teacher)


def _from_checkpoint(
    prefix: str, saved: Mapping[str, Any], config: ViTConfig, head: MapConfig | None
) -> VisionTransformer | DenseModel:
    """Return the model with the weights of a checkpoint, or with their moving averages."""
    model: Any = VisionTransformer(config, dtype="float32")
    model = model if head is None else DenseModel(model, head)
    variables = {
        f"average/{v.path}" if f"average/{v.path}" in saved else f"weights/{v.path}": v.value for v in model.weights
    }
    if missing := sorted(variables.keys() - saved.keys()):
        raise CheckpointError(f"{prefix} is not of the model that its manifest describes: it lacks {missing[:3]}")
    tf.train.Checkpoint(variables=variables).read(prefix).expect_partial().assert_existing_objects_matched()
    return model
