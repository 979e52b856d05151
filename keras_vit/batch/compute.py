"""Compute embeddings or classes of images in batches, in this process or on a Ray cluster."""

import abc
import ctypes
import functools
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keras_vit._util.files import replacing
from keras_vit._util.text import escaped, needs_extra
from keras_vit.batch.folder import INPUTS, Folder
from keras_vit.batch.images import Item
from keras_vit.errors import DownloadError
from keras_vit.model import preprocess
from keras_vit.model.classify import IMAGE_ERRORS, find_broken, prepare, unit_length
from keras_vit.model.config import ViTConfig

if TYPE_CHECKING:
    from keras_vit.export.runtime import FileModel
    from keras_vit.model.vision_transformer import VisionTransformer

# What is computed, and the model's output that it is computed from; "" is the embedding.
WHAT = {
    "embeddings": "",
    "features": "features",
    "logits": "logits",
    "probabilities": "logits",
    "classes": "logits",
    "patches": "patches",  # the last block's, row by row
}
CLASSES = {"label_id": pa.string(), "label": pa.string(), "probability": pa.float32()}
READERS = 32  # threads that wait for a disk or a network
GROUP_BYTES = 8 << 20  # of a row group, about


class Batch(NamedTuple):
    """Images that are ready for the model, of one output file."""

    number: int  # of the file
    inputs: str  # see `Folder.hash_inputs`
    names: list[str]
    images: np.ndarray  # float32 (batch_size, height, width, channels), also in the place of bad images
    errors: list[str | None]


class BaseWorker(abc.ABC):
    """Write output files; subclasses prepare and compute the images of a batch. `dtype` is that of the values.

    `model` prepares single images and names classes; `width` is the number of values of an image.
    """

    def __init__(
        self,
        model: Any,
        *,
        what: str,
        dtype: str,
        batch_size: int,
        image_shape: tuple[int, ...],
        width: int,
        image_dtype: str = "float32",
    ) -> None:
        self._model = model
        self._what = what
        self._batch_size = batch_size
        self._dtype = np.dtype(dtype)
        self._images_shape = (batch_size, *image_shape)
        self._image_dtype = np.dtype(image_dtype)
        self._finish = unit_length if what == "embeddings" else functools.partial(model.task.exported_output, what)
        values = CLASSES if what == "classes" else {what: pa.list_(pa.from_numpy_dtype(self._dtype), width)}
        self._schema = pa.schema({"path": pa.string(), **values, "error": pa.string()})

    @property
    def _preparing_threads(self) -> int:
        """Number of batches that are prepared at a time."""
        return os.cpu_count() or 1

    @abc.abstractmethod
    def _compute(self, images: np.ndarray) -> np.ndarray:
        """Compute the values of a batch, float32 (batch_size, width)."""

    @abc.abstractmethod
    def _prepare_images(self, files: list[bytes]) -> Iterator[np.ndarray | Exception]:
        """Prepare image files, or yield the errors of those that cannot be read."""

    def run(self, folder: Folder, numbers: Iterable[int]) -> Iterator[int]:
        """Write output files; yield the number of images in each batch."""
        for (number, inputs), batches in itertools.groupby(self._batches(folder, numbers), lambda batch: batch[:2]):
            tables: list[pa.Table] = []
            schema = self._schema.with_metadata({INPUTS: inputs})
            with replacing(folder.file(number)) as file, pq.ParquetWriter(file, schema) as writer:
                for batch in batches:
                    tables.append(self._rows(batch))
                    if sum(table.nbytes for table in tables) > GROUP_BYTES:
                        writer.write_table(pa.concat_tables(tables))
                        tables.clear()
                    yield len(batch.names)
                writer.write_table(pa.concat_tables([*tables, self._schema.empty_table()]))

    def _batches(self, folder: Folder, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield the batches of all files in order, each prepared while the model computes those before it."""
        threads = self._preparing_threads
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(READERS) as readers:
            for number in numbers:
                inputs, items, group = folder.hash_inputs(number), folder.items(number), None
                while group or group is None:  # one batch at least, so that each file is written
                    group = list(itertools.islice(items, self._batch_size))
                    waiting.append(pool.submit(self._prepare, number, inputs, group, readers))
                    if len(waiting) > threads:
                        yield waiting.popleft().result()
            yield from (future.result() for future in waiting)

    def _prepare(self, number: int, inputs: str, items: list[Item], readers: ThreadPoolExecutor) -> Batch:
        files = list(readers.map(_read_item, items))
        lost = [error for _, error in files if isinstance(error, OSError) and not isinstance(error, FileNotFoundError)]
        if len(lost) == self._batch_size:  # no damaged images, but a network or permissions
            raise lost[0]
        # As texts: an error would keep all of the batch. Names in them may not be valid Unicode.
        errors = [None if error is None else escaped(str(error)) for _, error in files]
        images = np.zeros(self._images_shape, self._image_dtype)
        readable = [place for place, error in enumerate(errors) if error is None]
        prepared = self._prepare_images([files[place][0] for place in readable])
        for place, image in zip(readable, prepared, strict=True):
            if isinstance(image, Exception):
                errors[place] = escaped(str(image))
            else:
                images[place] = image
        if any(errors):
            _return_freed_memory()
        return Batch(number, inputs, [escaped(name) for name, _ in items], images, errors)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is the error of its row
    def _rows(self, batch: Batch) -> pa.Table:
        """Compute the rows of a batch, with a path, values or None, and an error or None."""
        outputs = self._compute(batch.images)[: len(batch.names)]
        values = self._finish(outputs).astype(self._dtype)
        errors = list(batch.errors)
        for place in np.flatnonzero(find_broken(values, are_logits=self._what == "classes")):
            errors[place] = errors[place] or f"The model's output is not finite in {self._dtype}"
        if self._what == "classes":
            best = self._model.decode_predictions(outputs, top=1) if errors else []
            rows = [(None,) * len(CLASSES) if error else top[0] for top, error in zip(best, errors, strict=True)]
            columns = [[row[place] for row in rows] for place in range(len(CLASSES))]
        else:
            is_bad = pa.array([error is not None for error in errors], pa.bool_())
            columns = [pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1], mask=is_bad)]
        return pa.table([batch.names, *columns, errors], schema=self._schema)


class Worker(BaseWorker):
    """A Keras model that writes output files. `dtype` is that of matrix products, `output_dtype` that of the values."""

    def __init__(
        self, model: "VisionTransformer", *, what: str, dtype: str, output_dtype: str, batch_size: int
    ) -> None:
        import tensorflow as tf

        from keras_vit.export import server

        config = model.config
        output = WHAT[what] or model.task.embedding_output()
        network = model if model.layers[1].compute_dtype == dtype else model.with_config(config, dtype=dtype)
        served = server.model_function(network)  # its weights in dtype too: half the memory in bfloat16

        def run(images: Any) -> Any:
            if what != "patches":
                return served(images)[output]
            [found] = network.feature_maps(images)
            return tf.reshape(tf.cast(found, tf.float32), (batch_size, -1))

        shape = (*config.size, config.num_channels)
        self._call = tf.function(run, input_signature=[tf.TensorSpec((batch_size, *shape))], autograph=False)
        # The pixels before normalization: in a graph, a division may be rounded differently.
        plain = replace(config.preprocessing, mean=(0,), std=(1 / 255,))
        self._decode = _decoder(config.replace(preprocessing=plain, labels=None))
        width = self._call.get_concrete_function().output_shapes[1]
        options: Any = {"what": what, "dtype": output_dtype, "batch_size": batch_size}
        super().__init__(model, **options, image_shape=shape, width=width)

    @property
    def _preparing_threads(self) -> int:
        from keras_vit.export.server import PARALLEL_IMAGES

        return max(1, (os.cpu_count() or 1) // PARALLEL_IMAGES)

    def _compute(self, images: np.ndarray) -> np.ndarray:
        values: np.ndarray = self._call(images).numpy()
        return values

    def _prepare_images(self, files: list[bytes]) -> Iterator[np.ndarray | Exception]:
        for file, pixels in zip(files, self._pixels(files), strict=True):
            try:
                if pixels is None:
                    yield preprocess.prepare_bytes(file, self._model.config)
                else:
                    yield preprocess.normalize(pixels, self._model.config.preprocessing)
            except IMAGE_ERRORS as error:
                yield error

    def _pixels(self, files: list[bytes]) -> list[np.ndarray | None]:
        """Decode files in the model's size; None for bad files, and other formats than JPEG and PNG."""
        import tensorflow as tf

        try:
            return list(np.asarray(self._decode(tf.constant(files, tf.string))))  # .numpy() would copy
        except tf.errors.OpError:  # in any of them
            return [None] if len(files) == 1 else [self._pixels([file])[0] for file in files]


def find_output(model: "FileModel", what: str) -> str:
    """Name the output of a file that something is computed from; raise a ValueError if there is none."""
    if what in ("features", "logits", "patches") and what not in model.outputs:
        raise ValueError(f"what={what!r} is none of the outputs of {model.path}. Received: {model.outputs}")
    return model.embedding_output() if WHAT[what] in ("", "features") else model.class_output()


class FileWorker(BaseWorker):
    """A .tflite file that writes output files, without TensorFlow."""

    def __init__(self, model: "FileModel", *, what: str, output_dtype: str, batch_size: int) -> None:
        self._output = find_output(model, what)
        options: Any = {"what": what, "dtype": output_dtype, "batch_size": batch_size}
        super().__init__(
            model,
            **options,
            image_shape=model.input_shape[1:],
            width=model.output_shape[-1],
            image_dtype=model.input_dtype,
        )
        if self._output == what == "probabilities":
            self._finish = functools.partial(np.asarray)

    def _compute(self, images: np.ndarray) -> np.ndarray:
        return self._model.run_prepared(images)[self._output]

    def _prepare_images(self, files: list[bytes]) -> Iterator[np.ndarray | Exception]:
        for file in files:
            image = prepare(self._model, file)
            yield image if isinstance(image, Exception) else image[0]


@functools.cache  # tracing takes longer than some runs
def _decoder(config: ViTConfig) -> Callable[[Any], Any]:
    import tensorflow as tf

    from keras_vit.export import server

    decode = functools.partial(server.decode, config=config)
    return tf.function(decode, input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)


def _return_freed_memory() -> None:
    """Give freed memory back to the system. Otherwise glibc keeps some for each damaged image."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _read_item(item: Item) -> tuple[bytes, Exception | None]:
    try:
        return item[1](), None
    except DownloadError:  # ends the run: of all images, not of this one
        raise
    except IMAGE_ERRORS as error:
        return b"", error


MODEL = "_model.keras"  # in the output folder, which all nodes share


class _Actor:
    def __init__(self, folder: Folder, settings: dict[str, Any]) -> None:
        self._folder = folder
        import keras

        self._worker = Worker(keras.saving.load_model(folder.path / MODEL), **settings)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"images": [sum(self._worker.run(self._folder, [number])) for number in rows["item"].tolist()]}


def run_on_ray(
    model: "VisionTransformer", settings: dict[str, Any], folder: Folder, numbers: Sequence[int]
) -> Iterator[int]:
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
    """Import ray, or raise an ImportError with the command that installs it."""
    with needs_extra('engine="ray"', "ray"):
        import ray
        import ray.data
    return ray
