"""Checkpoints of a training run that outlive kill -9, power cuts, full disks and flipped bits.

    folder/
        step-00000500/
            variables.index             tf.train.Checkpoint: a tensor for each variable, by its name
            variables.data-00000-of-00001
            manifest.json               step, facts, names, shapes and dtypes, sizes and SHA-256 of the other files
        step-00000600.unfinished        step 600 is being written or deleted: it does not count
        .lock                           held by the process that trains here (local folders only)

What is there is read from this listing; TensorFlow's own state file `checkpoint` is neither written nor believed.
"""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import filelock
import tensorflow as tf

from keras_vit.errors import CheckpointError
from keras_vit.train.loop import manifest, storage

STEP = re.compile(r"step-(\d{8,})")
UNFINISHED = ".unfinished"


@contextlib.contextmanager
def exclusive(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps a folder to one training process; the operating system ends it with the process, however that dies.

    In a bucket there is nothing to lock: there two processes are not kept apart.

    Args:
        folder: Where the run keeps its files; made where it is missing.

    Raises:
        BlockingIOError: Another process, or another run of this one, holds the folder.
    """
    path = storage.made_folder(folder)
    if not storage.is_local(path):
        yield
        return
    lock = filelock.FileLock(f"{path}/.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise BlockingIOError(
            f"Another process trains in this folder: {path}. Wait for its end, stop it, or use another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


class Saves:
    """The checkpoints of one run in one folder.

    Args:
        folder: A local path or `gs://bucket/path`; made where it is missing. One process at a time may save in
            it: see `exclusive`.
        variables: What a checkpoint holds, by name. Any dtype and any distribution strategy.
        keep: How many checkpoints stay, the newest ones; at least 1.
        facts: What a continued run must have in common with the one that saved (recipe, model, data), as nested
            mappings that JSON can hold.
        may_differ: Dotted names of facts that need not be equal, `"recipe.log_steps"`; a name of a mapping
            stands for everything below it.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        variables: Mapping[str, tf.Variable],
        *,
        keep: int = 3,
        facts: Mapping[str, Any],
        may_differ: Collection[str] = (),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more: the newest checkpoint is needed to go on. Received: {keep}")
        self.folder = storage.made_folder(folder)
        self._facts: dict[str, Any] = json.loads(json.dumps(facts))  # as they will come back: tuples are lists
        self._may_differ = frozenset(may_differ)
        self._keep = keep
        self._checkpoint = tf.train.Checkpoint(variables=dict(variables))
        self._shapes = {name: [v.dtype.name, v.shape.as_list()] for name, v in variables.items()}
        self._latest: int | None = None  # the step that the variables were last restored from or saved at
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, damaged ones too, in ascending order."""
        return sorted(self._listed("") - self._listed(UNFINISHED))

    def restore(self) -> int | None:
        """Sets all variables to the newest checkpoint that is whole. Writes nothing.

        Warns of each damaged one it passes, by name and reason.

        Returns:
            The step of that checkpoint; None where none was ever completed.

        Raises:
            CheckpointError: All are damaged; or the newest whole one is of a run with other facts or variables
                (each is named). No variable has changed then.
        """
        reasons = []
        for step in reversed(self.steps()):
            try:
                saved = manifest.verified(self._path(step), step)
            except manifest.DamagedError as damage:
                self._damaged.add(step)
                reasons.append(f"{self._path(step)} is damaged: {damage}.")
                continue
            self._compare(saved)
            for reason in reasons:
                warnings.warn(f"{reason} Training goes on from step {step}, the one before.", stacklevel=2)
            status = self._checkpoint.read(f"{self._path(step)}/variables")
            status.assert_consumed().assert_existing_objects_matched()
            self._latest = step
            return step
        if reasons:
            raise CheckpointError(
                "No checkpoint can be used, and training does not silently start anew.\n  "
                + "\n  ".join(reasons)
                + f"\nBring one back, or use another folder. Folder: {self.folder}"
            )
        return None

    def save(self, step: int) -> str:
        """Saves all variables, reads the files back, and only then deletes checkpoints beyond `keep`.

        When it returns, the checkpoint is on the disk and outlives a power cut. Saving the step that was just
        saved or restored again does nothing.

        Args:
            step: How many steps the variables have seen, never less than at the last save.

        Returns:
            The checkpoint's folder, as a string: a `pathlib.Path` cannot hold `gs://`.

        Raises:
            OSError: It cannot be written (a full disk); earlier checkpoints are as they were, and nothing is left
                of this one.
            ValueError: The step lies before the last one, or the folder holds checkpoints that `restore` was not
                asked for.
        """
        if self._latest is None and self.steps():
            raise ValueError(f"{self.folder} holds checkpoints: call restore() first, or use another folder.")
        if self._latest is not None and step < self._latest:
            raise ValueError(f"Steps only grow. The last one here is {self._latest}. Received: {step}")
        if step != self._latest:
            with storage.plain_errors(
                f"Step {step} cannot be saved in {self.folder}, where the checkpoints before it are as they were"
            ):
                self._write(step)
            self._latest = step
            self._damaged.discard(step)
            with storage.plain_errors(f"Old checkpoints cannot be deleted in {self.folder}"):
                self._prune(step)
        return self._path(step)

    def _path(self, step: int) -> str:
        return f"{self.folder}/step-{step:08d}"

    def _mark_of(self, step: int) -> str:
        return self._path(step) + UNFINISHED

    def _listed(self, suffix: str) -> set[int]:
        """The steps of which the folder has an entry whose name ends in `suffix`."""
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self.folder))  # folders of buckets end in /
        return {
            int(m[1]) for name in names if name.endswith(suffix) and (m := STEP.fullmatch(name.removesuffix(suffix)))
        }

    def _write(self, step: int) -> None:
        path = self._path(step)
        try:
            for unfinished in self._listed(UNFINISHED):
                self._delete(unfinished)
            self._mark(step)
            storage.remove(path)  # a damaged one: a whole one would have been restored
            tf.io.gfile.makedirs(path)
            self._checkpoint.write(f"{path}/variables")
            _read_back(f"{path}/variables")
            files = sorted(tf.io.gfile.glob(f"{path}/variables.*"))
            storage.settle(*files)
            manifest.write(path, {"step": step, "facts": self._facts, "variables": self._shapes}, files)
            self._unmark(step)
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(OSError, tf.errors.OpError):  # the mark says that it does not count
                self._delete(step)
            raise

    def _delete(self, step: int) -> None:
        self._mark(step)
        storage.remove(self._path(step))
        self._unmark(step)

    def _mark(self, step: int) -> None:
        if not tf.io.gfile.exists(self._mark_of(step)):  # on a full disk there may be no writing it again
            storage.replace(self._mark_of(step), b"")

    def _unmark(self, step: int) -> None:
        storage.settle(self.folder)  # the mark is the last to go, after a power cut as well
        tf.io.gfile.remove(self._mark_of(step))
        storage.settle(self.folder)

    def _prune(self, newest: int) -> None:
        """Deletes what stands before `newest`: damaged ones, and whole ones beyond `keep`."""
        steps = [step for step in self.steps() if step <= newest]
        kept = [step for step in steps if step not in self._damaged][-self._keep :]
        for step in sorted(set(steps).difference(kept)):
            self._delete(step)

    def _compare(self, saved: dict[str, Any]) -> None:
        """Refuses a checkpoint of another run."""
        facts = manifest.differences(saved["facts"], self._facts, self._may_differ)
        shapes = manifest.differences(saved["variables"], self._shapes)
        for title, remedy, lines in (
            ("a run with other settings", "the settings of that run", facts),
            ("other variables", "the model and optimizer that were saved", shapes),
        ):
            if lines:
                listed = "\n  ".join(lines)
                raise CheckpointError(
                    f"{self.folder} holds checkpoints of {title}:\n  {listed}\nUse another folder, or {remedy}."
                )


def _read_back(prefix: str) -> None:
    """Reads every tensor, which compares each with the CRC-32C that was taken of it in memory."""
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    for name in reader.get_variable_to_shape_map():
        reader.get_tensor(name)
