"""Use a .tflite file as a model: NumPy, Pillow and ai-edge-litert, without TensorFlow and Keras.

The code of `model.preprocess` prepares pixels, and that of the model's task reads outputs, as the config in the file
says. Several images are computed side by side, each by an interpreter of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import queue
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.files import read_file
from keras_vit._util.text import warn
from keras_vit.errors import OverwrittenFileError
from keras_vit.export.exported import ExportedModel, Outputs, load_exported, main_name
from keras_vit.export.litert import metadata
from keras_vit.model import preprocess
from keras_vit.model import task as tasks
from keras_vit.model.classify import IMAGE_ERRORS, check_outputs, single_images, unit_length
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.pillow import decode_with_pillow
from keras_vit.model.task import Prediction
from keras_vit.model.tokenizer import Tokenizer

AHEAD = 2  # images a thread that are prepared or computed before the first of them is asked for
MOST_THREADS = 4  # of one image: two take a tenth more processor time than one, and more were not measured
Result = TypeVar("Result")
Run = Callable[[np.ndarray], Outputs]  # from a batch to the outputs of the file


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> FileModel | TextFileModel:
    """Load a .tflite file of `export.tflite`, or of `text.tflite`, as a model, without TensorFlow and Keras.

    Args:
        path: the file. The tokenizer of a file of texts must lie beside it, as it was written.
        threads: number of images that are computed at a time, and, up to 4, threads of a single image; None for the
            number of processors. Each image has its own copy of the weights, as soon as there are so many.

    Returns:
        An object with the methods of the model that the file can compute. They return what those of VisionTransformer
        and DenseModel return, and may be called by several threads at a time: `classify(images, top=5)`,
        `embed(images)`, `predict_maps(images)`, `predict_segments(images, task=, threshold=, stuff_classes=)`;
        `features(images)`, float32 (images, width), of any length; `preprocess(images)`, to the same bytes; and
        `run(images)`, all outputs by name. Of a file of texts it has `embed(texts)`.

        Images are paths of files, folders or patterns, image files as bytes, Pillow images, arrays (height, width,
        channels) or (batch, height, width, channels) of 0..255, of any size, or a list of these.

    Raises:
        FileNotFoundError: there is no such file, or no tokenizer beside a file of texts.
        ValueError: it is no .tflite file, or does not say how to prepare images: only those of keras_vit do. The
            methods raise one for an image that cannot be read, and for what the file has no output for.
            LiteRT does not check all that a file states: do not run files of strangers.
        OverwrittenFileError: by the methods, if the file was overwritten since. A file renamed onto it is not seen.
        ImportError: ai-edge-litert is missing.

    Example:
        >>> from keras_vit import digits, export
        >>> report = export.tflite(keras_vit.zoo.load("digits"), "digits.tflite")
        >>> model = export.load("digits.tflite")
        >>> model.classify(digits.load().test_images[0], top=1)[0][0].label
        'seven'
    """
    path = Path(as_path(path, "path"))
    if threads is not None:
        check_counts(threads=threads)
    if path.is_dir():
        raise ValueError(f"{path} is a folder. export.load reads .tflite files; TensorFlow reads SavedModels")
    interpreters = Interpreters(path, threads or os.cpu_count() or 1)
    facts = _read_facts(path)
    if "text" in facts:
        return TextFileModel(path, facts["text"], interpreters)
    return FileModel(path, facts, interpreters)


def _read_facts(path: Path) -> dict[str, Any]:
    """Read what a file says about its model; raise a ValueError if it says nothing."""
    files = metadata.read_files(path)
    try:
        facts: dict[str, Any] = json.loads(files[metadata.MODEL])
    except (KeyError, ValueError):
        raise ValueError(
            f"{path} does not say what its model is: {metadata.MODEL} is missing at its end, or damaged. Write it "
            "again, with keras_vit.export.tflite of this version"
        ) from None
    if facts.get("labels") is None and metadata.LABELS in files:
        facts["labels"] = tuple(files[metadata.LABELS].decode().splitlines())
    return facts


class Interpreters:
    """Interpreters of a file, each started when it is needed, and used by one thread at a time.

    LiteRT maps the file: weights are read from it as they are needed. A file that is overwritten in use is an error,
    one that is replaced by another of its name goes on as it was loaded.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self.first = load_exported(path, threads=min(count, MOST_THREADS))
        self._loaded = path.stat()
        self._single: queue.SimpleQueue[ExportedModel] = queue.SimpleQueue()
        self._single.put(self.first)
        self._several: queue.SimpleQueue[ExportedModel | None] = queue.SimpleQueue()
        for _ in range(count if count > 1 else 0):
            self._several.put(None)
        self._path = path.absolute()

    def run(self, images: np.ndarray) -> Outputs:
        """Compute all outputs for images: a dict from an output's name to an array (images, ...)."""
        file = self._single.get()
        try:
            return self._call(file, images)
        finally:
            self._single.put(file)

    def run_beside(self, images: np.ndarray) -> Outputs:
        """Run a batch on one thread, beside others."""
        if self.count == 1:
            return self.run(images)
        file = self._several.get()
        try:
            if file is None and not self._is_loaded_file():
                return self.run(images)
            file = file or load_exported(self._path, threads=1)
            return self._call(file, images)
        finally:
            self._several.put(file)

    def _call(self, file: ExportedModel, images: np.ndarray) -> Outputs:
        self._is_loaded_file()  # of a file that was cut off, the operating system would end the process
        outputs = file.call(images)
        self._is_loaded_file()
        return outputs

    def _is_loaded_file(self) -> bool:
        """Whether the path still names the file that was loaded; raise an error if that was overwritten."""
        try:
            now = self._path.stat()
        except OSError:
            return False
        if not os.path.samestat(now, self._loaded):
            return False
        if (now.st_size, now.st_mtime_ns) != (self._loaded.st_size, self._loaded.st_mtime_ns):
            raise OverwrittenFileError(
                f"{self._path} was overwritten while it was in use, and its weights are those of another file now. "
                "Load it again. To replace a file in use, write the new one beside it and rename it (mv)"
            )
        return True

    def map(self, function: Callable[[Any, Run], Result], items: Iterable[Any]) -> Iterator[Result]:
        """Call a function of an item and `run`; several calls at a time if there are several items."""
        items = iter(items)
        start = list(itertools.islice(items, 2))
        if len(start) < 2 or self.count == 1:
            yield from (function(item, self.run) for item in itertools.chain(start, items))
            return
        waiting: deque[Future[Result]] = deque()
        with ThreadPoolExecutor(self.count) as pool:
            for item in itertools.chain(start, items):
                waiting.append(pool.submit(function, item, self.run_beside))
                if len(waiting) > AHEAD * self.count:
                    yield waiting.popleft().result()
            yield from (future.result() for future in waiting)


class FileModel:
    """A .tflite file as a model of images, with the methods that `load` lists.

    `head` has the fields of a model of maps, else it is None. `input_dtype` is "uint8" for a file that takes pixels.
    """

    def __init__(self, path: Path, facts: dict[str, Any], interpreters: Interpreters) -> None:
        self.path = path
        self.config = ViTConfig(**facts["config"])
        self.head: Any = types.SimpleNamespace(**facts["head"]) if facts["head"] else None
        self._interpreters = interpreters
        self._file = interpreters.first
        self.outputs = list(self._file.output_shapes)
        self.input_dtype = self._file.dtype
        self.input_shape: Any = (None, *self._file.shape)
        self.output_shape: Any = self._file.output_shapes[main_name(dict.fromkeys(self.outputs))]
        self.task = self._make_task(facts["labels"])

    def _make_task(self, labels: Any) -> Any:
        if self.head is not None:
            from keras_vit.dense.map_tasks import Depth, Segmentation
            from keras_vit.dense.segments import Segments

            known = {"num_classes": self.head.num_classes, "labels": labels}
            if self.head.output == "depth":
                return Depth(max_depth=self.head.max_depth)
            if self.head.output == "segments":
                return Segments(**known)
            return Segmentation(**known, image_size=self.config.size)
        if not self.config.num_classes and "features" not in self.outputs:  # a Keras model of others
            is_pooled = len(self.output_shape) == 2
            return tasks.Classification(num_classes=self.output_shape[-1], labels=labels, is_pooled=is_pooled)
        return dataclasses.replace(tasks.from_config(self.config), labels=labels)

    def preprocess(self, images: Any) -> np.ndarray:
        """Prepare images as the file takes them: float32 or uint8 (batch, height, width, channels)."""
        return np.concatenate([self._prepare(image) for image in single_images(images)])

    @property
    def input_preprocessing(self) -> Preprocessing:
        """How images are prepared before the file: the model's own, or less if the file takes pixels."""
        own = self.config.preprocessing
        if self.input_dtype == "float32":
            return own
        # A file for images of another size cuts them itself.
        return preprocess.without_normalization(own, cuts=self.input_shape[1:3] == self.config.size)

    def _prepare(self, image: Any) -> np.ndarray:
        size, pixels = self.input_shape[1:3], self.read(image)
        if size != self.config.size and pixels.shape[:2] != size:
            warn(
                f"keras_vit: {self.path.name} resizes pixels of {size[0]}x{size[1]} itself. Images of other sizes are "
                f"resized twice, and results differ from the model's. Received: {pixels.shape[0]}x{pixels.shape[1]}"
            )
        prepared = preprocess.prepare_pixels(
            pixels[None],
            image_size=size,
            num_channels=self.config.num_channels,
            preprocessing=self.input_preprocessing,
        )
        return np.round(prepared).astype(np.uint8) if self.input_dtype == "uint8" else prepared

    def read(self, image: Any) -> np.ndarray:
        """Read one image by Pillow, not resized: uint8 or float32 (height, width, channels) of 0..255."""
        channels, stated = self.config.num_channels, self.config.preprocessing
        if isinstance(image, bytes | bytearray):
            return preprocess.with_channels(decode_with_pillow(bytes(image), stated), channels)
        if isinstance(image, str | os.PathLike):
            name = os.fspath(image)
            if name.startswith(preprocess.DOWNLOADED):
                from keras_vit._util.downloads import fetch

                name = os.fspath(fetch(name))
            try:
                data = read_file(name.removeprefix("file://"))
                return preprocess.with_channels(decode_with_pillow(data, stated), channels)
            except ValueError as error:
                raise ValueError(f"{os.fspath(image)!r} {error}") from None
        [[pixels]] = preprocess.to_arrays(image, channels, stated)
        return pixels

    def run(self, images: Any) -> Outputs:
        """Prepare images and compute all outputs of the file.

        Args:
            images: see the class.

        Returns:
            A dict from an output's name to an array (images, ...).

        Raises:
            ValueError: an image cannot be read, there is none, or the file computes NaN or infinity.
            FileNotFoundError: there is no file at a path, or no image in a folder.
        """
        rows = [_raised(result) for result in self.run_each(images)]
        if not rows:
            raise ValueError("The model needs at least one image. Received: an empty list")
        return {name: np.concatenate([row[name] for row in rows]) for name in self.outputs}

    def run_each(self, images: Any) -> Iterator[Outputs | Exception]:
        """Compute the outputs of each image, or yield the error of one that cannot be read."""
        single = single_images(images)
        size = self._file.batch or 1
        groups = iter(lambda: list(itertools.islice(single, size)), [])
        for results in self._interpreters.map(self._run_group, groups):
            yield from results

    def _run_group(self, images: list[Any], run: Run) -> list[Outputs | Exception]:
        prepared = [_attempt(self._prepare, image) for image in images]
        readable = [image for image in prepared if not isinstance(image, Exception)]
        rows: Iterator[Outputs] = iter(())
        if readable:
            [(batch, _)] = self._file.batches(np.concatenate(readable))
            outputs = run(batch)
            for name, values in outputs.items():
                check_outputs(values, are_logits=name == "logits" and self.head is None)
            rows = ({name: values[i : i + 1] for name, values in outputs.items()} for i in range(len(readable)))
        return [image if isinstance(image, Exception) else next(rows) for image in prepared]

    def run_prepared(self, images: np.ndarray) -> Outputs:
        """Compute all outputs of prepared images (batch, height, width, channels), several at a time."""
        self._file.check_images(images)
        parts = [*self._interpreters.map(lambda part, run: _run_part(run, *part), self._file.batches(images, 1))]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.outputs}

    def classify(self, images: Any, top: int = 5) -> list[list[Prediction]]:
        """List (label_id, label, probability) of the `top` most probable classes of each image."""
        results = [_raised(result) for result in self.classify_each(images, top)]
        if not results:
            raise ValueError("classify needs at least one image. Received: an empty list")
        return results

    def classify_each(self, images: Any, top: int = 5) -> Iterator[list[Prediction] | Exception]:
        """Classify each image, or yield the error of one that cannot be read."""
        name = self.class_output()
        check_counts(top=top)
        for result in self.run_each(images):
            yield result if isinstance(result, Exception) else self.decode_predictions(result[name], top)[0]

    def class_output(self) -> str:
        """Name the output that says the class of an image; raise a ValueError if the file has none."""
        if self.head is not None:
            raise ValueError(f"classify needs classes of whole images. Received: {self.path}, {self.task.NAME}")
        self.task.check_classes(f"classify ({self.path} was exported without one: use embed or features)")
        return main_name(dict.fromkeys(self.outputs))

    def decode_predictions(self, values: np.ndarray, top: int = 5) -> list[list[Prediction]]:
        """Name the most probable classes by what the file returns, (batch, classes)."""
        if self.class_output() == "logits":
            return list(self.task.decode(values, top))
        return list(self.task.rank(values, values, top))

    def embed(self, images: Any) -> np.ndarray:
        """Embed images: float32 (images, width) of length 1."""
        return unit_length(self.run(images)[self.embedding_output()])

    def embedding_output(self) -> str:
        """Name the output that embeds an image; raise a ValueError if the file has none."""
        name: str | None = self.task.embedding_output() if self.head is None else None
        if name not in self.outputs or (name == "logits" and not self.task.is_projection):
            raise ValueError(
                f"{self.path} has no features, its outputs are {self.outputs}. Export the model without its head: "
                "zoo.load(name, num_classes=0), keras-vit export MODEL --num-classes 0 --to features.tflite"
            )
        return name

    def features(self, images: Any) -> np.ndarray:
        """Compute the features of images, of any length: float32 (images, width), or of every token."""
        name = "features" if "features" in self.outputs else self.embedding_output()
        return self.run(images)[name]

    def predict_maps(self, images: Any) -> list[np.ndarray]:
        """Compute a map for every image, at its own size; class numbers of a file of these are repeated."""
        return self._maps(images, self._predict_map)

    def predict_segments(
        self, images: Any, *, task: str | None = None, threshold: float = 0.8, stuff_classes: Collection[int] = ()
    ) -> list[Any]:
        """Find the segments of every image: a list of `dense.SegmentMap`."""
        from keras_vit.dense.framing import segment_image
        from keras_vit.dense.segments import check_limits

        if self.head is None or self.head.output != "segments":
            raise ValueError(f"predict_segments needs the file of a model with queries, an EoMT. Received: {self.path}")
        check_limits(threshold, stuff_classes, self.head.num_classes)
        options: Any = {"task": task, "threshold": threshold, "stuff_classes": stuff_classes}
        options["names"] = self.task.class_names()

        def segment(pixels: np.ndarray, run: Run) -> Any:
            return segment_image(pixels, self.head, self.config, functools.partial(self._run_one, run=run), **options)

        return self._maps(images, segment)

    def _maps(self, images: Any, function: Callable[[np.ndarray, Any], Any]) -> list[Any]:
        if self.head is None:
            raise ValueError(f"predict_maps needs the file of a model of maps. Received: {self.path}, {self.task.NAME}")
        results = list(
            self._interpreters.map(lambda image, run: function(self.read(image), run), single_images(images))
        )
        if not results:
            raise ValueError("predict_maps needs at least one image. Received: an empty list")
        return results

    def _predict_map(self, pixels: np.ndarray, run: Run) -> np.ndarray:
        from keras_vit.dense.framing import frame, framed_size, repeat, run_windows, to_image

        size: Any = pixels.shape[:2]
        if self.head.output == "segments":
            from keras_vit.dense.segments import class_scores

            one = functools.partial(self._run_one, run=run)
            return to_image(class_scores(*run_windows(pixels, self.head, self.config, one)), self.head, size)
        wanted = framed_size(size, self.head, tuple(self.head.size or self.config.size))
        if wanted == self.input_shape[1:3]:
            prepared = frame(pixels, self.head, self.config)
        else:
            if wanted != self.config.size:
                warn(
                    f"keras_vit: the model resizes an image of {size[0]}x{size[1]} to {wanted[0]}x{wanted[1]}, and "
                    f"{self.path.name} takes {self.config.size[0]}x{self.config.size[1]} alone: it is squeezed"
                )
            prepared = self._prepare(pixels)
        outputs = self._run_one(prepared, run)
        name = main_name(outputs)
        check_outputs(outputs[name])
        found = outputs[name][0]
        return repeat(found, size) if name == "classes" else to_image(found, self.head, size)

    def _run_one(self, prepared: np.ndarray, run: Run) -> Outputs:
        """Run the file on one image that is prepared as the model takes it, (1, height, width, channels)."""
        if self.input_dtype == "uint8" and prepared.dtype != np.uint8:
            mean, std = (np.array(values) for values in (self.config.preprocessing.mean, self.config.preprocessing.std))
            prepared = np.round((prepared * std + mean) * 255).clip(0, 255).astype(np.uint8)
        [(batch, count)] = self._file.batches(prepared)
        return _run_part(run, batch, count)


class TextFileModel:
    """A .tflite file of `text.tflite` as a model of texts."""

    def __init__(self, path: Path, facts: dict[str, Any], interpreters: Interpreters) -> None:
        self.path = path
        self._interpreters = interpreters
        beside = path.parent / facts["file"]
        if not beside.is_file():
            raise FileNotFoundError(f"The tokenizer of {path} must lie beside it. There is no file {beside}")
        self.tokenizer = Tokenizer(beside.read_bytes(), length=facts["length"], padding=facts["pad_id"])
        found = {name: value for name, value in self.tokenizer.facts.items() if facts[name] != value}
        if found:
            raise ValueError(f"{beside} is the tokenizer of another model than {path}'s. Received: {found}")

    def embed(self, texts: str | Iterable[str]) -> np.ndarray:
        """Embed one text or several: float32 (texts, width) of length 1."""
        ids = self.tokenizer(texts)
        features = np.concatenate([*self._interpreters.map(lambda row, run: run(row[None])["features"], ids)])
        check_outputs(features)
        return unit_length(features)


def _attempt(function: Callable[[Any], np.ndarray], image: Any) -> np.ndarray | Exception:
    try:
        return function(image)
    except IMAGE_ERRORS as error:
        return error


def _run_part(run: Run, images: np.ndarray, count: int) -> Outputs:
    return {name: values[:count] for name, values in run(images).items()}


def _raised(result: Result | Exception) -> Result:
    if isinstance(result, Exception):
        raise result
    return result
