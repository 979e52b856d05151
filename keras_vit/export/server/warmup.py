"""Write warmup requests for TensorFlow Serving: the first call of each batch size is slow."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_vit._util.checks import is_count

MAX_RECORDS = 1000  # that a server accepts
FILE = Path("assets.extra") / "tf_serving_warmup_requests"


def check_batch_sizes(batch_sizes: Iterable[int]) -> list[int]:
    """Return the batch sizes as a list; raise a ValueError if they are not integers >= 1."""
    sizes: list[Any] = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [None]
    if not all(is_count(size, least=1) for size in sizes):
        raise ValueError(
            f"warmup must be batch sizes >= 1, such as (1, 8); () means none. Received: {batch_sizes!r:.200}"
        )
    return [int(size) for size in sizes]


def write(folder: Path, signatures: Iterable[str], batch_sizes: Sequence[int]) -> None:
    """Write a request of tiny JPEG files for every signature and batch size into a SavedModel's folder.

    The file is a TFRecord of tensorflow.serving.PredictionLog messages (tensorflow_serving/apis/prediction_log.proto).
    They are encoded here, which needs no further package. A ValueError says if there are more than MAX_RECORDS.
    """
    names = list(signatures)
    if len(batch_sizes) * len(names) > MAX_RECORDS:
        limit = MAX_RECORDS // len(names)
        raise ValueError(f"warmup must be at most {limit} batch sizes. Received: {len(batch_sizes)}")
    if not batch_sizes or not names:
        return
    image = tf.io.encode_jpeg(tf.fill((8, 8, 3), tf.constant(128, tf.uint8))).numpy()
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as records:
        for name in names:
            for size in batch_sizes:
                records.write(_prediction_log(name, tf.make_tensor_proto([image] * size).SerializeToString()))


def _prediction_log(signature: str, tensor: bytes) -> bytes:
    model_spec = _field(3, signature.encode())  # the server adds the model's name
    inputs = _field(1, b"image_bytes") + _field(2, tensor)  # one entry of a map
    request = _field(1, model_spec) + _field(2, inputs)
    return _field(6, _field(1, request))  # PredictionLog.predict_log, PredictLog.request


def _field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field of a protocol buffer."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
