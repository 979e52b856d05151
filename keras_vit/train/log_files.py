"""Log of a training run: means of metrics as JSON lines and TensorBoard events, and a picture at the end.

A line of `log.jsonl` is one JSON object, such as `{"step": 10, "loss": 2.3}`; NaN and infinity, which JSON lacks, are
the strings "NaN", "Infinity" and "-Infinity", which `float()` reads. `tensorboard/` holds the same numbers as events.
"""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.text import duration, needs_extra, warn
from keras_vit.train.checkpoints import EVENTS, LOG, PLOT, as_os_error, is_local, make_folder, read_file, replace_file
from keras_vit.train.step import metric_names

# `tf.summary.scalar` itself needs the package tensorboard.
SCALARS = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)
SLOW_STEP = 5.0  # seconds of the first step that are said at once
# A panel shows the metric of this name and those that end in it, such as `evaluation_loss`.
PANELS = ("loss", "accuracy", "learning_rate", "gradient_norm")


class Log:
    """Log of one run in one folder; `last_step` is the step of the restored checkpoint, None for a new run.

    Opening it drops the lines of later steps, which the run will write again; no line is lost if the run calls `flush`
    before it saves a checkpoint. Each start writes an event file of its own, and those before stay as they are.
    """

    def __init__(self, folder: str | os.PathLike[str], *, last_step: int | None = None) -> None:
        self._folder = make_folder(folder)
        self._path = f"{self._folder}/{LOG}"
        self._pending: list[tuple[int, dict[str, float]]] = []
        self._events: Any = None  # opened for the first line: a finished run changes nothing
        with as_os_error(f"{self._folder} cannot be brought back to step {last_step}"):
            kept = [record for record in _records(self._path) if last_step is not None and record["step"] <= last_step]
            self.last = kept[-1] if kept else None  # line of the restored run
            text = "".join(json.dumps(record) + "\n" for record in kept).encode()
            if tf.io.gfile.exists(self._path) and text != read_file(self._path):
                replace_file(self._path, text)

    def write(self, step: int, **scalars: float) -> None:
        """Add one line of numbers (Python, NumPy or TensorFlow), visible at once in a local folder."""
        self._pending.append((int(step), {name: float(value) for name, value in scalars.items()}))
        if is_local(self._path):  # in a bucket every write uploads the whole file
            self.flush()

    def flush(self) -> None:
        """Write everything to the files."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        with as_os_error(f"{self._folder} cannot be written"):
            with tf.io.gfile.GFile(self._path, "a") as file:
                for step, values in pending:
                    json_able = {name: v if math.isfinite(v) else json.dumps(v) for name, v in values.items()}
                    file.write(json.dumps({"step": step} | json_able) + "\n")
            self._events = self._events or tf.summary.create_file_writer(f"{self._folder}/{EVENTS}")
            with self._events.as_default():  # flushes at its end
                for step, values in pending:
                    tf.summary.experimental.write_raw_pb(_summary(values), step=step)

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        if self._events is not None:
            self._events.close()


def _summary(values: dict[str, float]) -> bytes:
    """Serialize the summary of all values at once, which is faster than a `tf.summary.scalar` for each."""
    scalars = [
        tf.compat.v1.Summary.Value(tag=name, metadata=SCALARS, tensor=tf.make_tensor_proto(value, tf.float32))
        for name, value in values.items()
    ]
    return bytes(tf.compat.v1.Summary(value=scalars).SerializeToString())


class MetricLogger:
    """Write means of metrics to the log (None for no files), the progress bar and `history`.

    `metrics` are the names of the task's metrics; `batch_size` is in images per step, `steps` are those to do.
    `advance(steps, text)` moves the progress bar and shows a text beside it. `print_line` prints how long a step takes
    and the whole run.
    """

    def __init__(
        self,
        log: Log | None,
        advance: Callable[..., None],
        *,
        metrics: Sequence[str],
        batch_size: int,
        steps: int,
        print_line: Callable[[str], None],
    ) -> None:
        self.history: list[dict[str, float]] = []  # all lines, with "step"
        self.pending: list[tuple[int, Any]] = []  # since the last line: steps, and metrics that may still be computed
        self._log = log
        self._advance = advance
        self._metrics = metrics
        self._batch_size = batch_size
        self._left = steps
        self._print_line = print_line
        self._calls = 0
        self._since = time.monotonic()
        self._timed_steps = 0  # since the last line
        self._all_steps, self._all_seconds = 0, 0.0
        self._shown = ""  # beside the bar
        self.show("compiling")  # until the first call is done

    def add(self, steps: int, metrics: Any) -> None:
        """Add the metrics of a call of `steps` steps, without waiting for them except for the first two.

        The first compiles, and the second says how long a step takes.
        """
        self.pending.append((steps, metrics))
        self._calls += 1
        self._left -= steps
        if self._calls > 1:
            self._timed_steps += steps
            self._advance(steps)
        else:
            metrics.numpy()
            self._advance(steps, "")
            self._say_time((time.monotonic() - self._since) / steps, " (the first, which compiles)", least=SLOW_STEP)
            self._since = time.monotonic()
        if self._calls == 2:
            metrics.numpy()
            self._say_time((time.monotonic() - self._since) / self._timed_steps)

    def _say_time(self, seconds: float, which: str = "", *, least: float = 0.0) -> None:
        """Say how long a step takes, if at least so long, and those that are left."""
        if self._left and seconds >= least:
            speed = f"{self._batch_size / seconds:,.3g} images/s"
            whole = f"{'at most ' * bool(which)}{duration(seconds * self._left)} for {self._left:,} more"
            self._print_line(f"a step takes {duration(seconds)}{which}, {speed}: {whole}")

    def log_means(self, done: int, *, learning_rate: float) -> dict[str, float]:
        """Write the means since the last call as the line of step `done`; return them by name."""
        steps = [count for count, _ in self.pending]
        values = np.average([metrics.numpy() for _, metrics in self.pending], axis=0, weights=steps)
        self.pending.clear()
        now = time.monotonic()
        seconds = now - self._since
        speed = self._timed_steps * self._batch_size / seconds if self._timed_steps else 0.0
        self._all_steps += self._timed_steps
        self._all_seconds += seconds
        self._since, self._timed_steps = now, 0
        means = dict(zip(metric_names(self._metrics), map(float, values), strict=True))
        line = {name: value for name, value in means.items() if name != "stop"}
        self.log(done, line | {"learning_rate": learning_rate, "images_per_second": speed})
        shown = "".join(f"  {name} {line[name]:.3f}" for name in self._metrics)
        self._shown = (
            f"loss {line['loss']:.4f}{shown}  lr {learning_rate:.2e}  grad norm {line['gradient_norm']:.2f}  "
            f"{speed:,.0f} images/s"
        )
        self.show(self._shown)
        return means

    def log_evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Write metrics on held-out images as one more line of step `done`, unless the restored log ends with it."""
        line = {f"evaluation_{name}": value for name, value in metrics.items()}
        if line and not (self._log and self._log.last == {"step": done, **line}):
            self.log(done, line)
        self.show(self._shown)  # the evaluation is over

    def log(self, done: int, line: Mapping[str, float]) -> None:
        """Write a line."""
        self.history.append({"step": done, **line})
        if self._log:
            self._log.write(done, **line)

    def show(self, text: str) -> None:
        """Show a text beside the progress bar."""
        self._advance(0, text)

    def flush(self) -> None:
        """Write all lines to the files."""
        if self._log:
            self._log.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the speed."""
        start = time.monotonic()
        yield
        self._since += time.monotonic() - start

    @property
    def images_per_second(self) -> float:
        """Speed of all steps after those of the first call; 0 if there are none."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else 0.0


def plot(folder: str | os.PathLike[str]) -> str:
    """Draw loss, accuracy, learning rate and gradient norm of a run's log into `plot.png`; return its path."""
    with needs_extra("A plot", "plots"):
        from matplotlib.figure import Figure
    path = make_folder(folder)
    records = _records(f"{path}/{LOG}")
    names = sorted({name for record in records for name in record}, key=lambda name: (len(name), name))
    panels = {panel: [n for n in names if f"_{n}".endswith(f"_{panel}")] for panel in PANELS}
    panels = {panel: curves for panel, curves in panels.items() if curves}
    if not panels:
        raise ValueError(f"Expected {LOG} with records of {', '.join(PANELS)}. Received: {path}, which has none.")
    figure = Figure(figsize=(7, 2.5 * len(panels)), layout="constrained")
    for axes, (panel, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for name in curves:
            points = [(record["step"], float(record[name])) for record in records if name in record]
            # Few points are hard to see on a curve without markers.
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
        axes.set(ylabel=panel.replace("_", " "), xlabel="step")
        if len(curves) > 1:
            axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    replace_file(f"{path}/{PLOT}", picture.getvalue())
    return f"{path}/{PLOT}"


def _records(path: str) -> list[dict[str, Any]]:
    """Read the lines of a log, if there is one; warn of those that a kill or a full disk left incomplete."""
    records = []
    for number, line in enumerate(read_file(path).splitlines() if tf.io.gfile.exists(path) else (), 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, LookupError):
            warn(f"{path}: line {number} is incomplete or no record, and is left out.")
    return records
