"""What a training run says of itself: JSON lines, TensorBoard events, and one picture at the end.

`log.jsonl` holds one JSON object a line, `{"step": 10, "loss": 2.3}`. Numbers that JSON does not know are the
strings "NaN", "Infinity" and "-Infinity", which Python's `float()` and JavaScript's `Number()` read. TensorBoard
finds the same in the folder `tensorboard`.
"""

import io
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_vit._util.text import install_command
from keras_vit.train.loop import storage

FILE = "log.jsonl"
EVENTS = "tensorboard"
# What `tf.summary.scalar` adds, which needs the package tensorboard to be installed where training runs.
SCALARS = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)
PICTURE = "plot.png"
# A panel shows the scalar of this name and those that end in it, as `evaluation_loss`.
PANELS = ("loss", "accuracy", "learning_rate", "gradient_norm")


class Log:
    """The log of one run in one folder.

    To continue a run, `resume` first. Nothing is then ever there twice, nor missing, if a run writes what
    belongs to a step and calls `flush` before it saves the checkpoint of that step.

    Args:
        folder: A local path or `gs://bucket/path`; made where it is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = storage.made_folder(folder)
        self._path = f"{self._folder}/{FILE}"
        self._events = f"{self._folder}/{EVENTS}"
        self._pending: list[tuple[int, dict[str, float]]] = []
        self._file: Any = None
        self._writer: Any = None

    def resume(self, step: int | None) -> None:
        """Drops what was written of later steps. Warns of lines and events that cannot be read, and drops them.

        Args:
            step: What `Saves.restore` returned: the step from which training goes on; None drops everything.

        Raises:
            OSError: The files cannot be read or rewritten.
        """
        self.close()
        last = -math.inf if step is None else step
        with storage.plain_errors(f"{self._folder} cannot be brought back to step {step}"):
            if tf.io.gfile.exists(self._path):
                _drop_later_records(self._path, last)
            for path in tf.io.gfile.glob(f"{self._events}/*tfevents*"):
                _drop_later_events(path, last)

    def write(self, step: int, **scalars: float) -> None:
        """Adds one record. In a local folder it outlives the process at once.

        Args:
            step: How many steps were done.
            scalars: Numbers by name, of Python, NumPy or TensorFlow; NaN and infinity too.

        Raises:
            OSError: It cannot be written (a full disk).
        """
        self._pending.append((int(step), {name: float(value) for name, value in scalars.items()}))
        if storage.is_local(self._path):  # to a bucket each time would upload the whole file
            self._hand_over()

    def flush(self) -> None:
        """Returns when everything written so far is on the disk and would outlive a power cut.

        Raises:
            OSError: It cannot be written (a full disk).
        """
        self._hand_over()
        if self._file is None:
            return
        with storage.plain_errors(f"{self._folder} cannot be written"):
            events = tf.io.gfile.glob([self._events, f"{self._events}/*tfevents*"])
            storage.settle(self._path, self._folder, *events)

    def close(self) -> None:
        """Flushes and lets go of the files; a later `write` opens them again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._writer.close()
            self._file = self._writer = None

    def _hand_over(self) -> None:
        """Gives what is pending to the operating system or the bucket."""
        if not self._pending:
            return
        if self._file is None:
            self._file = tf.io.gfile.GFile(self._path, "a")
            self._writer = tf.summary.create_file_writer(self._events)
        pending, self._pending = self._pending, []
        with storage.plain_errors(f"{self._folder} cannot be written"):
            for step, values in pending:
                spelled = {name: v if math.isfinite(v) else json.dumps(v) for name, v in values.items()}
                self._file.write(json.dumps({"step": step} | spelled) + "\n")
            self._file.flush()
            with self._writer.as_default():  # flushes at its end
                for step, values in pending:
                    for name, value in values.items():
                        tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=SCALARS)


def plot(folder: str | os.PathLike[str]) -> str:
    """Draws loss, accuracy, learning rate and gradient norm over the steps, as far as the log has them.

    Args:
        folder: That of the run.

    Returns:
        The picture's path, `plot.png` in that folder.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"A plot needs the package matplotlib: {install_command('plots')}") from error
    path = storage.made_folder(folder)
    records = _records(f"{path}/{FILE}") if tf.io.gfile.exists(f"{path}/{FILE}") else []
    names = sorted({name for record in records for name in record}, key=lambda name: (len(name), name))
    panels = {panel: [n for n in names if f"_{n}".endswith(f"_{panel}")] for panel in PANELS}
    panels = {panel: curves for panel, curves in panels.items() if curves}
    if not panels:
        raise ValueError(f"Expected {FILE} with records of {', '.join(PANELS)}. Received: {path}, which has none.")
    figure = Figure(figsize=(7, 2.5 * len(panels)), layout="constrained")
    for axes, (panel, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for name in curves:
            points = [(record["step"], float(record[name])) for record in records if name in record]
            # A curve of few points is seen by its points.
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
        axes.set(ylabel=panel.replace("_", " "), xlabel="step")
        if len(curves) > 1:
            axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    storage.replace(f"{path}/{PICTURE}", picture.getvalue())
    return f"{path}/{PICTURE}"


def _records(path: str) -> list[dict[str, Any]]:
    """The records of a log, without lines that a kill or a power cut tore."""
    records = []
    for number, line in enumerate(storage.read(path).splitlines(), 1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
            records.append(record)
        except (ValueError, TypeError, LookupError):
            warnings.warn(f"{path}: line {number} is torn or no record, and is left out.", stacklevel=4)
    return records


def _drop_later_records(path: str, last: float) -> None:
    kept = b"".join(json.dumps(record).encode() + b"\n" for record in _records(path) if record["step"] <= last)
    if kept != storage.read(path):
        storage.replace(path, kept)


def _drop_later_events(path: str, last: float) -> None:
    """Rewrites a file of TensorBoard events without those of later steps and without a torn end."""
    records, torn = [], False
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            records.append(record)
    except tf.errors.DataLossError:
        torn = True
        warnings.warn(f"{path}: what follows event {len(records)} is torn, and is left out.", stacklevel=4)
    events = map(tf.compat.v1.Event.FromString, records)
    kept = [record for record, event in zip(records, events, strict=True) if _opens(event) or event.step <= last]
    if torn or len(kept) < len(records):
        # Written elsewhere: TensorBoard would take a temporary file beside it for one more file of events.
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "events")
            with tf.io.TFRecordWriter(str(part)) as writer:
                for record in kept:
                    writer.write(record)
            storage.replace(path, part.read_bytes())


def _opens(event: Any) -> bool:
    """Whether this is the first event of a file, which belongs to no step."""
    return bool(event.HasField("file_version"))
