"""Checkpoints of a training run that survive kill -9, power cuts, full disks and flipped bits.

    folder/
        step-00000500/
            variables.index, variables.data-00000-of-00001      tf.train.Checkpoint: a tensor per variable, by name
            manifest.json               step, facts, names, shapes and dtypes, sizes and SHA-256 of the other files
        step-00000600.unfinished        step 600 is being written or deleted, and is ignored

These names are the only list of checkpoints: TensorFlow's state file `checkpoint` is neither written nor read.
"""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

import tensorflow as tf

from keras_vit._util.checks import table_problems
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from keras_vit.train._recipe import Recipe
from keras_vit.train.loop import storage

STEP = re.compile(r"step-(\d{8,})")
UNFINISHED = ".unfinished"
MANIFEST = "manifest.json"


class _File(TypedDict):
    bytes: int
    sha256: str


class _Content(TypedDict):
    step: int
    facts: dict[str, Any]
    variables: dict[str, Any]
    files: dict[str, _File]


class _Manifest(TypedDict):
    content: _Content
    sha256: str


class DamagedError(Exception):
    """A checkpoint differs from what was saved; the message says how."""


def newest(folder: str) -> tuple[str, dict[str, Any]] | None:
    """Return path and manifest of the newest checkpoint whose manifest can be read, or None; no tensor is read."""
    for step in reversed(_finished_steps(folder)):
        path = _path(folder, step)
        with contextlib.suppress(DamagedError):
            return f"{path}/variables", read_manifest(path, step)
    return None


class Checkpoints:
    """Checkpoints of one run in one folder, which only one process at a time may use, see `locks.exclusive`.

    `variables` and `facts` (settings that JSON can hold) are by name; facts must be the same when a run is continued,
    except the dotted names `may_differ`, with all below them, and `may_be_added`, which were None in checkpoints of
    earlier versions. The newest `keep` are kept. `writes` is False on all workers except the chief. `check` raises an
    error if another process has taken the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        variables: Mapping[str, tf.Variable],
        *,
        keep: int = 3,
        facts: Mapping[str, Any],
        may_differ: Collection[str] = (),
        may_be_added: Collection[str] = (),
        writes: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = storage.make_folder(folder)
        self._facts: dict[str, Any] = json.loads(json.dumps(facts))  # as they are read back: tuples become lists
        self._may_differ = frozenset(may_differ)
        self._may_be_added = frozenset(may_be_added)
        self._keep = keep
        self._writes = writes
        self._check = check
        self._checkpoint = tf.train.Checkpoint(variables=dict(variables))
        self._shapes = {name: [v.dtype.name, v.shape.as_list()] for name, v in variables.items()}
        self._latest: int | None = None  # step of the last restore or save
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, in ascending order."""
        return _finished_steps(self.folder)

    def restore(self) -> int | None:
        """Set the variables to the newest undamaged checkpoint, and return its step; None if there are no checkpoints.

        Warns of newer ones that are damaged. Raises CheckpointError, and changes nothing, if all are damaged or the run
        that saved had other facts or variables.
        """
        reasons = []
        for step in reversed(self.steps()):
            path = _path(self.folder, step)
            try:
                saved = verified(path, step)
            except DamagedError as damage:
                self._damaged.add(step)
                reasons.append(f"{path} is damaged: {damage}.")
                continue
            self._compare(saved)
            for reason in reasons:
                warnings.warn(f"{reason} Training continues from step {step}, the one before.", stacklevel=2)
            self._checkpoint.read(f"{path}/variables").assert_consumed().assert_existing_objects_matched()
            self._latest = step
            return step
        if reasons:
            raise CheckpointError(
                "No checkpoint can be used, and training does not silently start again from the beginning.\n  "
                + "\n  ".join(reasons)
                + f"\nRestore one of them, or use another folder. Folder: {self.folder}"
            )
        return None

    def save(self, step: int) -> str:
        """Save the variables after `step` steps, verify the files, delete old checkpoints; return the new one's path.

        Does nothing for the step of the last save or restore. When it returns, the checkpoint survives a power cut;
        when it raises OSError (a full disk), earlier checkpoints are unchanged.
        """
        path = _path(self.folder, step)
        if not self._writes or step == self._latest:
            return path
        if self._latest is None and self.steps():
            raise ValueError(f"{self.folder} holds checkpoints: call restore() first, or use another folder.")
        self._check()
        with storage.as_os_error(
            f"Step {step} cannot be saved in {self.folder}, where the checkpoints before it are as they were"
        ):
            self._write(step)
        self._latest = step
        self._damaged.discard(step)
        with storage.as_os_error(f"Old checkpoints cannot be deleted in {self.folder}"):
            self._prune(step)
        return path

    def _write(self, step: int) -> None:
        path = _path(self.folder, step)
        try:
            for unfinished in _listed(self.folder, UNFINISHED):
                _delete(_path(self.folder, unfinished))
            _mark(path)
            storage.remove(path)  # an existing one is damaged, or it would have been restored
            tf.io.gfile.makedirs(path)
            self._checkpoint.write(f"{path}/variables")
            reader = tf.compat.v1.train.NewCheckpointReader(f"{path}/variables")
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)  # compares it with the CRC-32C of its values in memory
            files = sorted(tf.io.gfile.glob(f"{path}/variables.*"))
            storage.sync(*files)
            content: dict[str, Any] = {"step": step, "facts": self._facts, "variables": self._shapes}
            content["files"] = {file.rpartition("/")[2]: _fingerprint(file) for file in files}
            text = json.dumps({"content": content, "sha256": _digest(content)})
            storage.replace(f"{path}/{MANIFEST}", text.encode() + b"\n")
            _unmark(path)
        except BaseException:  # also Ctrl-C
            with contextlib.suppress(OSError, tf.errors.OpError):  # while marked, it is ignored
                _delete(path)
            raise

    def _prune(self, newest: int) -> None:
        """Delete checkpoints up to `newest`: all damaged ones, and those beyond `keep`."""
        steps = [step for step in self.steps() if step <= newest]
        kept = [step for step in steps if step not in self._damaged][-self._keep :]
        for step in steps:
            if step not in kept:
                _delete(_path(self.folder, step))

    def _compare(self, saved: dict[str, Any]) -> None:
        """Raise CheckpointError if another run saved the checkpoint."""
        earlier = dict(saved["facts"])
        with contextlib.suppress(LookupError, TypeError, ValueError):  # add the fields that there were not then
            earlier["model"] = ViTConfig(**earlier["model"]).to_dict()
            earlier["recipe"] = Recipe.from_dict(earlier["recipe"]).to_dict()
        found = {
            name: (then, now)
            for name, (then, now) in _differences(earlier, self._facts).items()
            if not (then == "null" and name in self._may_be_added)
            and not any(f"{name}.".startswith(f"{other}.") for other in self._may_differ)
        }
        title, remedy = "a run with other settings", "the settings of that run"
        if not found:
            found = _differences(saved["variables"], self._shapes)
            title, remedy = "other variables", "the model and optimizer that were saved"
        if found:
            listed = "\n  ".join(f"{name}: {then} then, {now} now" for name, (then, now) in found.items())
            raise CheckpointError(
                f"{self.folder} holds checkpoints of {title}:\n  {listed}\nUse another folder, or {remedy}."
            )


def _path(folder: str, step: int) -> str:
    return f"{folder}/step-{step:08d}"


def _finished_steps(folder: str) -> list[int]:
    """Return the steps of all checkpoints that are not being written or deleted, in ascending order."""
    return sorted(_listed(folder, "") - _listed(folder, UNFINISHED))


def _listed(folder: str, suffix: str) -> set[int]:
    """Return the steps of all entries of a folder whose names end in `suffix`; none if there is no folder."""
    if not tf.io.gfile.isdir(folder):
        return set()
    names = (name.rstrip("/") for name in tf.io.gfile.listdir(folder))  # a bucket's folders end in /
    return {int(m[1]) for name in names if name.endswith(suffix) and (m := STEP.fullmatch(name.removesuffix(suffix)))}


def _delete(path: str) -> None:
    _mark(path)
    storage.remove(path)
    _unmark(path)


def _mark(path: str) -> None:
    """Mark a checkpoint as unfinished."""
    if not tf.io.gfile.exists(path + UNFINISHED):  # a full disk may have no room for another one
        storage.replace(path + UNFINISHED, b"")


def _unmark(path: str) -> None:
    folder = path.rpartition("/")[0]
    storage.sync(folder)  # after a power cut the mark must not be gone before the files
    tf.io.gfile.remove(path + UNFINISHED)
    storage.sync(folder)


def read_manifest(folder: str, step: int) -> dict[str, Any]:
    """Return the `content` of the manifest of a step, or raise a DamagedError; other files are not read."""
    try:
        manifest = json.loads(storage.read(f"{folder}/{MANIFEST}"))
        problem = next(table_problems(manifest, _Manifest, MANIFEST), None)
        if problem is None and manifest["sha256"] != _digest(manifest["content"]):
            problem = "its SHA-256 differs"
    except tf.errors.OpError as error:
        raise _unreadable(MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        problem = type(error).__name__
    if problem is not None:
        raise DamagedError(f"{MANIFEST} is not what was saved ({problem[:200]})")
    content: dict[str, Any] = manifest["content"]
    if content["step"] != step:
        raise DamagedError(f"its files are those of step {content['step']}")
    return content


def verified(folder: str, step: int) -> dict[str, Any]:
    """Compare all files of a checkpoint with its manifest, byte for byte; return the `content`."""
    content = read_manifest(folder, step)
    for name, expected in content["files"].items():
        if "/" in name:
            raise DamagedError(f"{MANIFEST} is not what was saved (it names the file {name!r:.80})")
        try:
            actual = _fingerprint(f"{folder}/{name}")
        except tf.errors.OpError as error:
            raise _unreadable(name, error) from error
        if actual["bytes"] != expected["bytes"]:
            raise DamagedError(f"{name} has {actual['bytes']:,} bytes, {expected['bytes']:,} were saved")
        if actual != expected:
            raise DamagedError(f"{name} is not what was saved (its SHA-256 differs)")
    return content


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the JSON of both values for each dotted name that differs, "(not there)" for one that is missing."""
    before, after = _flat(then), _flat(now)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: (before.get(name, "(not there)"), after.get(name, "(not there)")) for name in names}


def _unreadable(name: str, error: tf.errors.OpError) -> DamagedError:
    # Without TensorFlow's message, which would repeat the path.
    return DamagedError(f"{name} cannot be read ({type(error).__name__.removesuffix('Error')})")


def _fingerprint(path: str) -> dict[str, Any]:
    sha256, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest()}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as one, with dotted names and values as JSON."""
    flat: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat
