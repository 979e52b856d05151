"""Save, restore and lock the files of a training run, in a local folder or in a bucket.

    folder/checkpoints/
        step-00000500/
            variables.index, variables.data-00000-of-00001      tf.train.Checkpoint: a tensor per variable, by name
            manifest.json       written last: step, facts, and the dtypes and shapes of the variables

Paths are strings, because `pathlib` would change `gs://bucket` to `gs:/bucket`.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import tensorflow as tf

from keras_vit._util.checks import as_path
from keras_vit._util.files import replacing
from keras_vit._util.text import error_reason, warn
from keras_vit.dense.config import MapConfig
from keras_vit.dense.model import DenseModel
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.optimizer import enable_lora
from keras_vit.zoo.pretrained import load_any, resolve

STEP = re.compile(r"step-(\d{8,})")
MANIFEST = "manifest.json"
# Files and folders that a run writes beside its checkpoints.
FINAL_MODEL, BEST_MODEL = "model.keras", "best.keras"
BEST_RECORD = "best.json"  # step and metrics of the best model
LOG, PLOT, EVENTS = "log.jsonl", "plot.png", "tensorboard"
SOLVED_PROBE = "probe.npz"  # what the head of a linear probe was solved from
RUN_FILES = (FINAL_MODEL, BEST_MODEL, BEST_RECORD, LOG, PLOT, EVENTS, SOLVED_PROBE)
# Fields that a run without stated ones chooses for its data, and stores as it chose them.
CHOSEN = {"steps", "batch_size", "image_size", "teacher_size", "warmup_fraction"}
_MISSING = "(not there)"  # in place of a fact
# Errors of damaged files. TensorFlow compares each tensor with its CRC-32C when it reads it.
DAMAGES = (tf.errors.OpError, ValueError, IndexError)


# ---- files --------------------------------------------------------------------------------------------------


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine, not a URL."""
    return "://" not in path


def plain_path(folder: str | os.PathLike[str]) -> str:
    """Strip `file://` and a final slash from a path, local or `gs://bucket/path`, and expand ~."""
    return as_path(os.fspath(folder).removeprefix("file://").rstrip("/"), "the folder of a run")


def make_folder(folder: str | os.PathLike[str]) -> str:
    """Create a folder, local or `gs://bucket/path`, if it does not exist; return its plain path."""
    path = plain_path(folder)
    tf.io.gfile.makedirs(path)
    return path


def read_file(path: str) -> bytes:
    """Read the bytes of a file, or raise a `tf.errors.OpError`."""
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read())


def replace_file(path: str, data: bytes) -> None:
    """Write a file, complete or not at all."""
    if is_local(path):
        with replacing(Path(path)) as file:
            file.write(data)
    else:
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)


def remove(path: str) -> None:
    """Delete a file or a folder with its contents, if it exists."""
    delete = tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove
    with contextlib.suppress(tf.errors.NotFoundError):
        delete(path)


@contextlib.contextmanager
def as_os_error(message: str) -> Iterator[None]:
    """Convert errors of Python's and TensorFlow's file functions to an OSError: message, reason, what to do."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        text = getattr(error, "message", "") or str(error) or type(error).__name__
        raise OSError(
            f"{message}: {error_reason(text)[:300]}. Make room there if the disk is full, and start again."
        ) from error


def check_run_folder(folder: str) -> None:
    """Raise a FileExistsError for files of a run's names in a folder without that run's checkpoints.

    A run makes the folder of its checkpoints first. If that is there, and empty, the run died before its first
    checkpoint and begins again.
    """
    if _finished_steps(f"{folder}/checkpoints"):
        return
    names = RUN_FILES[:1] if tf.io.gfile.isdir(f"{folder}/checkpoints") else RUN_FILES
    if found := [name for name in names if tf.io.gfile.exists(f"{folder}/{name}")]:
        raise FileExistsError(
            errno.EEXIST,
            f"The folder has {', '.join(found)} and no checkpoint of a run, which training would replace. Move them "
            "away, put the folder checkpoints/ of their run back, or choose another folder than",
            folder,
        )


@contextlib.contextmanager
def exclusive(folder: str) -> Iterator[None]:
    """Keep a local folder for one training run; raise BlockingIOError if another run has it. A bucket has no lock."""
    if not is_local(folder):
        yield
        return
    try:
        lock = filelock.FileLock(f"{folder}/.lock", timeout=0).acquire()
    except filelock.Timeout:
        raise BlockingIOError(
            f"Another process trains in this folder: {folder}. Wait for its end, stop it, or use another folder."
        ) from None
    except OSError as error:
        raise OSError(
            f"{folder}/.lock cannot be locked ({error.strerror or error}). It must be a file that you may write: "
            "remove what is there, or use another folder."
        ) from error
    with lock:
        yield


# ---- checkpoints --------------------------------------------------------------------------------------------


class Checkpoints:
    """Checkpoints of one run in one folder, which only one process at a time may use, see `exclusive`.

    `variables` and `facts` (settings that JSON can hold) are by name; facts must be the same when a run is continued,
    except the dotted names `may_differ`, with all below them. The newest `keep` are kept. `writes` is False on all
    workers except the chief.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        variables: Mapping[str, tf.Variable],
        *,
        keep: int = 3,
        facts: Mapping[str, Any],
        may_differ: Collection[str] = (),
        writes: bool = True,
    ) -> None:
        path = plain_path(folder)
        if wrong := sorted(set("*?[") & set(path)):
            raise ValueError(
                f"TensorFlow takes {' '.join(wrong)} in a path for a pattern, and could not read the checkpoints: "
                f"use another folder. Received: {path}"
            )
        self.folder = make_folder(path)
        self._facts: dict[str, Any] = json.loads(json.dumps(facts))  # as they are read back: tuples become lists
        self._may_differ = frozenset(may_differ)
        self._keep = keep
        self._writes = writes
        self._checkpoint = tf.train.Checkpoint(variables=dict(variables))
        self._shapes = {name: [v.dtype.name, v.shape.as_list()] for name, v in variables.items()}
        self._latest: int | None = None  # step of the last restore or save
        self.changed: dict[str, tuple[str, str]] = {}  # facts that differ: the checkpoint's and ours
        self._damaged: set[int] = set()

    @property
    def run_folder(self) -> str | None:
        """Folder around this one, for the other files of the run; None on a worker that does not write."""
        return self.folder.rpartition("/")[0] if self._writes else None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, damaged ones included, in ascending order."""
        return _finished_steps(self.folder)

    def restore(self) -> int | None:
        """Set the variables to the newest undamaged checkpoint, and return its step; None if there are no checkpoints.

        Warns of newer ones that are damaged. Raises CheckpointError if all are damaged, or if the run that saved had
        other facts or variables.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            path = _path(self.folder, step)
            try:
                self._check(_read_manifest(path))
                self._checkpoint.read(f"{path}/variables").assert_consumed().assert_existing_objects_matched()
            except CheckpointError:
                raise
            except DAMAGES as error:
                self._damaged.add(step)
                reason = error_reason(getattr(error, "message", "") or str(error) or type(error).__name__)
                reasons.append(f"{path} is damaged: {reason[:300]}.")
                continue
            for reason in reasons:
                warn(f"{reason} Training continues from step {step}, the one before.")
            self._latest = step
            return step
        if reasons:
            raise CheckpointError(
                "No checkpoint can be used, and training does not silently start again from the beginning.\n  "
                + "\n  ".join(reasons)
                + f"\nRestore one of them, or use another folder. Folder: {self.folder}"
            )
        return None

    def save(self, step: int) -> None:
        """Save the variables after `step` steps, and delete old checkpoints.

        Does nothing for the step of the last save or restore. When it raises OSError (a full disk), earlier checkpoints
        are unchanged.
        """
        if not self._writes or step == self._latest:
            return
        path = _path(self.folder, step)
        with as_os_error(
            f"Step {step} cannot be saved in {self.folder}, where the checkpoints before it are as they were"
        ):
            try:
                remove(path)  # an existing one is damaged or unfinished, or it would have been restored
                tf.io.gfile.makedirs(path)
                self._checkpoint.write(f"{path}/variables")
                content = {"step": step, "facts": self._facts, "variables": self._shapes}
                replace_file(f"{path}/{MANIFEST}", json.dumps(content).encode() + b"\n")
            except BaseException:  # also Ctrl-C
                with contextlib.suppress(OSError, tf.errors.OpError):  # without a manifest it is ignored
                    remove(path)
                raise
        self._latest = step
        self._damaged.discard(step)
        whole = [saved for saved in self.steps() if saved <= step and saved not in self._damaged]
        with as_os_error(f"Old checkpoints cannot be deleted in {self.folder}"):
            for old in _list_steps(self.folder):
                if old <= step and old not in whole[-self._keep :]:
                    remove(_path(self.folder, old))

    def clear(self) -> None:
        """Delete all checkpoints."""
        for step in _list_steps(self.folder):
            remove(_path(self.folder, step))
        self._latest = None

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Raise CheckpointError if another run saved the checkpoint."""
        self.changed = _differences(saved["facts"], self._facts)
        differences = {
            name: (then, now)
            for name, (then, now) in self.changed.items()
            if not any(f"{name}.".startswith(f"{allowed}.") for allowed in self._may_differ)
        }
        title, remedy = "a run with other settings", "the settings of that run"
        if not differences:
            differences = _differences(saved["variables"], self._shapes)
            title, remedy = "other variables", "the model and optimizer that were saved"
        if differences:
            listed = "\n  ".join(f"{name}: {then} then, {now} now" for name, (then, now) in differences.items())
            raise CheckpointError(
                f"{self.folder} holds checkpoints of {title}:\n  {listed}\nUse another folder, or {remedy}."
            )


def newest(folder: str) -> tuple[str, dict[str, Any]] | None:
    """Find path and manifest of the newest checkpoint whose manifest can be read, or None; no tensor is read."""
    for step in reversed(_finished_steps(folder)):
        path = _path(folder, step)
        with contextlib.suppress(*DAMAGES):
            return f"{path}/variables", _read_manifest(path)
    return None


def _path(folder: str, step: int) -> str:
    return f"{folder}/step-{step:08d}"


def _finished_steps(folder: str) -> list[int]:
    """Steps of all finished checkpoints, in ascending order."""
    return [step for step in _list_steps(folder) if tf.io.gfile.exists(f"{_path(folder, step)}/{MANIFEST}")]


def _list_steps(folder: str) -> list[int]:
    """Steps of all checkpoints, unfinished ones included, in ascending order; none if there is no folder."""
    if not tf.io.gfile.isdir(folder):
        return []
    names = (name.rstrip("/") for name in tf.io.gfile.listdir(folder))  # a bucket's folders end in /
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def _read_manifest(path: str) -> dict[str, Any]:
    """Read step, facts and variables of a checkpoint, or raise one of DAMAGES."""
    content: Any = json.loads(read_file(f"{path}/{MANIFEST}"))
    if not isinstance(content, dict) or not {"step", "facts", "variables"} <= content.keys():
        raise ValueError(f"{MANIFEST} does not have step, facts and variables")
    return content


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Compare by dotted names: the JSON of both values where they differ, _MISSING for one that is not there."""
    before, after = _flatten(then), _flatten(now)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: (before.get(name, _MISSING), after.get(name, _MISSING)) for name in names}


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to one with dotted names and values as JSON."""
    flat: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat


# ---- a new run that begins with the model of another one ------------------------------------------------------


@dataclass(frozen=True)
class EarlierRun:
    """The run in a folder: its recipe, its arguments for the data, and its last model."""

    folder: str
    recipe: Recipe  # keeps the head
    data: dict[str, str]  # as `DataRequest.stored` returned them; {} if the data were arrays
    model: VisionTransformer | DenseModel
    teacher: str | None = None  # name or path

    def complete(self, request: DataRequest) -> DataRequest:
        """Fill a request with the earlier run's arguments where it has none, unless it names other data."""
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
    path = plain_path(folder)
    if out is not None and Path(plain_path(out)).resolve() == Path(path).resolve():
        raise ValueError(f"A new run needs its own folder: out must not be that of continue_from. Received: {path}")
    checkpoint = newest(f"{path}/checkpoints")
    if checkpoint is None:
        raise FileNotFoundError(
            f"There is no run to continue from. Expected a folder that keras_vit trained in. Received: {path}"
        )
    prefix, saved = checkpoint
    try:
        # The earlier run may have chosen its number of micro-batches on another machine.
        recipe = Recipe.from_dict(saved["facts"]["recipe"]).replace(accumulation="auto", reset_head=False)
        if recipe.optimizer != "least_squares":  # what that run chose for its data is not chosen anew
            recipe = replace(recipe, changed=(recipe.changed or frozenset()) | CHOSEN)
        data = saved["facts"]["data"].get("arguments") or {}
        config = ViTConfig(**saved["facts"]["model"])
        head = MapConfig(**saved["facts"]["head"]) if "head" in saved["facts"] else None
        teacher = saved["facts"].get("teacher", {}).get("source")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{prefix} is not of a run that can be continued: {error}") from error
    if is_local(path) and Path(path, "model.keras").exists():
        model = load_any(resolve(f"{path}/model.keras"), dtype="float32")
    else:
        model = _from_checkpoint(prefix, saved["variables"], config, head, recipe)
    return EarlierRun(path, recipe, data, model, teacher)


def _from_checkpoint(
    prefix: str, saved: Mapping[str, Any], config: ViTConfig, head: MapConfig | None, recipe: Recipe
) -> VisionTransformer | DenseModel:
    """Load a model with the weights of a checkpoint, or with their moving averages."""
    model: Any = VisionTransformer(config, dtype="float32")
    model = model if head is None else DenseModel(model, head)
    enable_lora(recipe, model)
    variables = {
        f"average/{v.path}" if f"average/{v.path}" in saved else f"weights/{v.path}": v.value for v in model.weights
    }
    if missing := sorted(variables.keys() - saved.keys()):
        raise CheckpointError(f"{prefix} is not of the model that its manifest describes: it lacks {missing[:3]}")
    tf.train.Checkpoint(variables=variables).read(prefix).expect_partial().assert_existing_objects_matched()
    return model.with_config(model.config)  # with the updates of LoRA in its kernels
