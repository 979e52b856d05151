"""Read and prepare images in background threads, run the model on them, and write the rows to Parquet files."""

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from keras_vit._util.atomic import replacing
from keras_vit._util.text import escaped
from keras_vit.batch.folder import Folder
from keras_vit.batch.images import Item
from keras_vit.export.server import image_bytes, inference
from keras_vit.model import preprocess
from keras_vit.model.classify import IMAGE_ERRORS, embedding_layer, softmax, unit_length
from keras_vit.model.vision_transformer import VisionTransformer

# What is computed: the model's output, where "" is the embedding, and the function of its rows.
WHAT: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "embeddings": ("", unit_length),
    "features": ("features", np.asarray),
    "logits": ("logits", np.asarray),
    "probabilities": ("logits", softmax),
    "classes": ("logits", np.asarray),
}
CLASSES = {"label_id": pa.string(), "label": pa.string(), "probability": pa.float32()}
READERS = 32  # threads, which wait for a disk or a network
GROUP_BYTES = 8 << 20  # of a row group, about
_Read = Callable[[], bytes]


class Batch(NamedTuple):
    """Images that are ready for the model, of one output file."""

    number: int  # of the file
    names: list[str]
    images: np.ndarray  # float32 (batch_size, height, width, channels); zeros in the place of bad images
    errors: list[Exception | None]


class Worker:
    """A model that writes output files."""

    def __init__(self, model: VisionTransformer, *, what: str, dtype: str, output_dtype: str, batch_size: int) -> None:
        self.model, self.what, self.batch_size = model, what, batch_size
        config, (output, self._finish) = model.config, WHAT[what]
        output = output or {"pre_logits": "features"}.get(embedding_layer(config), "logits")
        if model.dtype_policy.compute_dtype != dtype:
            policy = dtype if dtype == "float32" else f"mixed_{dtype}"
            model = model.rebuilt(config, dtype=policy)
        run = inference.float32_function(model)
        shape = (batch_size, *config.size, config.num_channels)
        self._call = tf.function(lambda x: run(x)[output], input_signature=[tf.TensorSpec(shape)])
        # The pixels before normalization: in a graph, a division may be rounded differently.
        plain = config.replace(preprocessing=replace(config.preprocessing, mean=(0,), std=(1 / 255,)))
        decode = functools.partial(image_bytes.tolerant, config=plain)
        self._decode = tf.function(decode, input_signature=[tf.TensorSpec((None,), tf.string)])
        self._dtype = np.dtype(output_dtype)
        width = self._call.get_concrete_function().output_shapes[1]
        values = {what: pa.list_(pa.from_numpy_dtype(self._dtype), width)} if what != "classes" else CLASSES
        self._schema = pa.schema({"path": pa.string(), **values, "error": pa.string()})

    def run(self, folder: Folder, numbers: Iterable[int]) -> Iterator[int]:
        """Write output files; yield the number of images in each batch."""
        for number, batches in itertools.groupby(self._prepare_all(folder, numbers), lambda batch: batch.number):
            with replacing(folder.file(number)) as file:
                yield from self._write(file, batches)

    def _prepare_all(self, folder: Folder, numbers: Iterable[int]) -> Iterator[Batch]:
        """Yield the batches of all files in order, each prepared while the model computes those before it."""
        threads = max(2, (os.cpu_count() or 1) // image_bytes.PARALLEL_IMAGES)
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(READERS) as readers:
            for number, items in self._groups(folder, numbers):
                waiting.append(pool.submit(self._prepare, number, items, readers))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _groups(self, folder: Folder, numbers: Iterable[int]) -> Iterator[tuple[int, list[Item]]]:
        """Yield the images of each file in groups; at least one group of each, so that the file is written."""
        for number in numbers:
            items = folder.items(number)
            yield number, list(itertools.islice(items, self.batch_size))
            while group := list(itertools.islice(items, self.batch_size)):
                yield number, group

    def _prepare(self, number: int, items: list[Item], readers: ThreadPoolExecutor) -> Batch:
        files = list(readers.map(self._read, items))
        pixels, valid = self._decode(
            tf.constant([b"" if isinstance(file, Exception) else file for file in files], tf.string)
        )
        images = np.zeros((self.batch_size, *pixels.shape[1:]), np.float32)
        images[: len(files)] = preprocess.normalize(pixels, self.model.config.preprocessing)
        errors: list[Exception | None] = [None] * len(files)
        for place in np.flatnonzero(~valid.numpy()):
            try:
                images[place] = self._prepare_one(files[place])
            except IMAGE_ERRORS as error:
                images[place], errors[place] = 0, error
        return Batch(number, [escaped(name) for name, _ in items], images, errors)

    def _read(self, item: Item) -> bytes | Exception:
        try:
            return item[1]()
        except IMAGE_ERRORS as error:
            return error

    def _prepare_one(self, file: bytes | Exception) -> np.ndarray:
        """Prepare a file of another format than JPEG and PNG, or raise the error of a bad one."""
        if isinstance(file, Exception):
            raise file
        return self.model.preprocess(preprocess.decode_bytes(file, self.model.config.num_channels))[0]

    def _write(self, file: BinaryIO, batches: Iterable[Batch]) -> Iterator[int]:
        """Write the rows of a file; where not one image is readable, as without permission, raise the error instead."""
        tables: list[pa.Table] = []
        errors: list[Exception | None] = []
        with pq.ParquetWriter(file, self._schema) as writer:
            for batch in batches:
                tables.append(self._rows(batch))
                errors += batch.errors
                if sum(table.nbytes for table in tables) > GROUP_BYTES:
                    writer.write_table(pa.concat_tables(tables))
                    tables.clear()
                yield len(batch.names)
            if tables:
                writer.write_table(pa.concat_tables(tables))
        unreadable = [e for e in errors if isinstance(e, OSError) and not isinstance(e, FileNotFoundError)]
        if errors and len(unreadable) == len(errors):
            raise unreadable[0]

    def _rows(self, batch: Batch) -> pa.Table:
        """Return the rows of a batch: path, values or None, and error or None."""
        count = len(batch.names)
        outputs = self._call(batch.images).numpy()[:count]
        with np.errstate(over="ignore"):  # it becomes an error below
            values = self._finish(outputs).astype(self._dtype)
        errors = [None if error is None else str(error) for error in batch.errors]
        for place in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            errors[place] = errors[place] or f"The model's output is not finite in {self._dtype}"
        if self.what == "classes":
            best = [ranking[0] for ranking in self.model.decode_predictions(outputs, top=1)] if count else []
            rows = [None if error else each for each, error in zip(best, errors, strict=True)]
            columns = [[row and row[place] for row in rows] for place in range(3)]
        else:
            is_bad = pa.array([error is not None for error in errors], pa.bool_())
            columns = [pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1], mask=is_bad)]
        return pa.table([batch.names, *columns, errors], schema=self._schema)
