"""Embed or classify any number of images into Parquet files."""

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from keras_vit._util.text import image_rate, needs_extra, warn

with needs_extra("keras_vit.batch", "batch"):
    import fsspec  # noqa: F401
    import pyarrow  # noqa: F401

from keras_vit._util.checks import as_path, check_counts, expand_home, given, one_of
from keras_vit._util.files import MAX_BYTES, check_no_file_in_way
from keras_vit._util.progress import counter
from keras_vit.batch import compute
from keras_vit.batch.compute import WHAT
from keras_vit.batch.folder import RECORD, EmbedResult, Folder, open_folder
from keras_vit.export.runtime import FileModel, load
from keras_vit.model.classify import IMAGE_ERRORS
from keras_vit.model.config import ViTConfig
from keras_vit.model.pillow import CHANNELS
from keras_vit.model.preprocess import prepare_bytes

if TYPE_CHECKING:
    from keras_vit.dense.model import DenseModel
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.zoo.pretrained import ResolvedModel

ROWS_PER_FILE = 4096
COMPARED = 16  # images of a run on which an int8 file and the model are compared
CPU_FLAGS = ("amx_bf16", "avx512_bf16")  # of processors that multiply bfloat16 matrices faster than float32
AMPERE = (8, 0)  # the first compute capability of NVIDIA's that does


def embed(
    model: "VisionTransformer | DenseModel | FileModel | str | os.PathLike[str]",
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    to: str | os.PathLike[str],
    what: str = "embeddings",
    dtype: str = "auto",
    output_dtype: str = "float32",
    batch_size: int = 16,
    rows_per_file: int | None = None,
    max_bytes: int = MAX_BYTES,
    shard: str = "0/1",
    retry_errors: bool = False,
    engine: str = "local",
    progress: bool = True,
    origin: Mapping[str, Any] | None = None,
) -> EmbedResult:
    """Compute the embeddings or predictions of any number of images, as rows of Parquet files.

    Each image is one row: its path, the values (or null) and an error (or null). Pixels are those of
    `model.preprocess(path)`. Memory does not grow with the number of images. A run that was stopped is continued by the
    same call: each file is written whole or not at all, and finished files are kept, unless one of their images is not
    as it was: by size and time, except of URLs. A warning says which are computed again.

    Args:
        model: the model, or a name, path or URL as for `keras-vit predict`. A .tflite file is computed without
            TensorFlow, an image on each processor.
        source: a folder (with its sub-folders), a pattern such as "photos/*.jpg", a .txt or .parquet file of paths or
            URLs, a folder or pattern of such URLs, or files of records (.tfrecord, .array_record). fsspec opens URLs,
            such as gs:// and s3://. A record is an image file, or a tf.train.Example with one. Or a list of these.
        to: the output folder, created if it does not exist. The list of images is written there first.
        what: "embeddings" (of length 1, as `model.embed`), "features" (of the head's input), "logits", "probabilities",
            "classes" (the best one: label_id, label, probability), or "patches" (the last block's, as
            `model.feature_maps` returns them: rows * columns * width values).
        dtype: of the products of matrices: "float32", "bfloat16", or "auto": bfloat16 where the device has it. "int8"
            is for CPUs: the model is exported once into the folder (mode "dynamic"), compared with the model on some of
            the images, and run on every processor; _run.json has the figures. A .tflite file has its own.
        output_dtype: of the values, "float32" or "float16".
        batch_size: number of images in a call of the model, >= 1. A GPU needs 128 or more to be fast.
        rows_per_file: number of rows of a Parquet file, >= 1. None is that of the run in the folder, of a new one 4096.
            The images of a file of records are one file.
        max_bytes: of an image file, >= 1. A larger file is a row with an error; at most so much of it is read.
        shard: "i/n" computes every n-th file from file i, 0 <= i < n, so that n processes share the work.
        retry_errors: whether to compute finished files again that have rows with an error.
        engine: "local", or "ray": on all nodes of the Ray cluster, which share the output folder.
        progress: whether to show a progress bar on a terminal.
        origin: of a model that is loaded already, what `keras-vit search` loads it by, as _run.json will say:
            {"model": name or path}, and "weights", "image_size" and "patch_size" if they were given.

    Returns:
        The folder, and the numbers of rows and of errors in all files that are finished.

    Raises:
        ValueError: an argument is wrong, the folder has the files of another run, or the run is finished and the source
            has other images now.
        FileNotFoundError, NotADirectoryError: there is no image; a file is where the folder would be.
        ImportError: a package is missing.

    Example:
        >>> from PIL import Image
        >>> from keras_vit import batch, digits
        >>> Image.fromarray(digits.load().test_images[0, ..., 0]).save("seven.png")
        >>> batch.embed("digits", "*.png", to="rows", what="classes")[1:]
        (1, 0)
        >>> import pyarrow.parquet
        >>> pyarrow.parquet.read_table("rows")["label"].to_pylist()
        ['seven']
    """
    one_of("what", what, tuple(WHAT))
    one_of("dtype", dtype, ("auto", "float32", "bfloat16", "int8"))
    one_of("output_dtype", output_dtype, ("float32", "float16"))
    one_of("engine", engine, ("local", "ray"))
    check_counts(batch_size=batch_size, max_bytes=max_bytes, **given(rows_per_file=rows_per_file))
    first, count = _parse_shard(shard)
    names, target = _check_paths(source, to)
    is_new = not (target / RECORD).exists()
    if engine == "ray":
        compute.import_ray()
    loaded, origin = _load_model(model, what, origin)
    facts = {
        "source": _absolute(names[0]) if len(names) == 1 else list(map(_absolute, names)),
        "what": what,
        "output_dtype": output_dtype,
        "weights": fingerprint(loaded),
        **given(rows_per_file=rows_per_file),
    }
    if dtype != "auto":
        facts["dtype"] = dtype
    is_file = isinstance(loaded, FileModel)
    if dtype == "int8" and (engine != "local" or what == "patches"):
        raise ValueError(f"dtype='int8' computes no patches, and not on Ray. Received: {what=}, {engine=}")
    if is_file and (dtype != "auto" or engine != "local"):
        received = f"dtype={dtype!r}, engine={engine!r}"
        raise ValueError(f"dtype and engine are for models: {loaded.path} has its own dtype. Received: {received}")
    state = {
        "working_folder": str(Path.cwd()),
        "dtype": "file" if is_file else _best_dtype(loaded),
        "rows_per_file": ROWS_PER_FILE,
    }
    folder = replace(open_folder(target, facts, state, origin), max_bytes=max_bytes)
    settings = {name: folder.record[name] for name in ("what", "output_dtype")} | {"batch_size": batch_size}
    is_int8 = folder.record["dtype"] == "int8"
    if not is_file and not is_int8:
        settings["dtype"] = folder.record["dtype"]
    numbers = folder.unfinished(first, count, retry_errors=retry_errors)
    if not is_new:
        numbers = _check_images(folder, numbers, (first, count))
    if numbers:
        if engine == "ray":
            computed = compute.run_on_ray(loaded, settings, folder, numbers)
        else:
            network: Any = quantized(loaded, folder, what) if is_int8 else loaded
            worker: Any = (compute.FileWorker if is_file or is_int8 else compute.Worker)(network, **settings)
            computed = worker.run(folder, numbers)
        # Only the files of records know how many images they have.
        total = None if folder.record["records"] else folder.record["images"] * len(numbers) // folder.record["files"]
        if progress and total and engine == "local" and not (is_file or is_int8):
            _say_time(loaded, total)
        with counter("Computing", total=total, show=progress) as advance:
            start, done = time.perf_counter(), 0
            for images in computed:
                done += images
                advance(images, image_rate(done / (time.perf_counter() - start)))
    return folder.result()


def _say_time(model: "VisionTransformer", images: int) -> None:
    """Say how long the images take on a CPU; nobody knows the speed of other devices."""
    import tensorflow as tf

    from keras_vit.model.cost import say_time

    if not any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU")):
        say_time(model, images, "--image-size")


def quantized(model: "VisionTransformer", folder: Folder, what: str) -> FileModel:
    """Load the int8 file of a model in the folder of a run; write it first, and record how far it is from the model."""
    from keras_vit.errors import VerificationError
    from keras_vit.export import tflite

    path = folder.path / f"_int8-{folder.record['weights']}.tflite"
    with FileLock(folder.path / ".lock"):
        if not path.exists():
            if what == "features" or model.task.embedding_output() == "features" and what == "embeddings":
                model = model.with_config(model.config.replace(num_classes=0))
            images: list[np.ndarray] = []
            for item in folder.items(0):
                with contextlib.suppress(*IMAGE_ERRORS):  # a row with an error, later
                    images.append(prepare_bytes(item[1](), model.config)[None])
                if len(images) == COMPARED:
                    break
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "keras_vit: MediaPipe")  # which never gets this file
                    report = tflite(model, path, verify=np.concatenate(images) if len(images) > 1 else None)
            except VerificationError as error:
                raise ValueError(f"dtype='int8' is too far from the model: take dtype='auto'. {error}") from None
            figures = given(cosine=report.mean_cosine, difference_cosine=report.difference_cosine, images=report.images)
            folder.note(int8=figures)
    loaded = load(path)
    assert isinstance(loaded, FileModel)
    return loaded


def _parse_shard(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard, re.ASCII) if isinstance(shard, str) else None
    if not match or not int(match[1]) < int(match[2]):
        raise ValueError(f'shard must be "i/n" with i from 0 to n - 1, such as "0/4". Received: {shard!r:.200}')
    return int(match[1]), int(match[2])


def _check_paths(source: Any, to: Any) -> tuple[list[str], Path]:
    """Check the paths of the sources, and of the output folder, which must be on this machine."""
    sources = list(source) if isinstance(source, list | tuple) else [source]
    names, target = [as_path(each, "source") for each in sources], as_path(to, "to")
    if not names:
        raise ValueError(f"source must be a path or a list of paths. Received: {source!r:.200}")
    for argument, value in (*(("source", name) for name in names), ("to", target)):
        if not value.strip():
            raise ValueError(f'{argument} must be a path; "." is the current folder. Received: {value!r:.200}')
    if re.match(r"[a-z][a-z0-9+.-]+:/", target):
        raise ValueError(f"to must be a folder of this machine, such as a mounted bucket. Received: {target!r:.200}")
    check_no_file_in_way(Path(target))
    return names, Path(target).absolute()


def _check_images(folder: Folder, unfinished: list[int], shard: tuple[int, int]) -> list[int]:
    """Return the files to compute, by number: also those whose images have changed.

    If the source has other images than the list, a finished run is a ValueError, and another one goes on with the list.
    """
    if changes := folder.describe_changes():
        reason = f"{folder.path}: the source has other images than were listed: {changes}"
        if not unfinished:
            raise ValueError(f"{reason}. Its run is finished: embed into a new folder")
        warn(f"{reason}. Its run goes on with the images of the list")
        return unfinished  # what is finished may be of images that are gone
    if stale := folder.stale(*shard):
        example = f"{len(stale):,}, such as {folder.file(stale[0]).name}"
        warn(f"{folder.path}: files whose images have changed are computed again: {example}")
    return sorted({*unfinished, *stale})


def _load_model(model: Any, what: str, origin: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
    """Load the model, and raise a ValueError if it does not compute this from image files."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).casefold().endswith(".tflite"):
        model = load(model)
    if isinstance(model, FileModel):
        compute.find_output(model, what)
        return model, {"model": _absolute(os.fspath(model.path))}

    import keras

    from keras_vit.dense.model import DenseModel
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.zoo.pretrained import load_any, resolve

    if not isinstance(model, VisionTransformer | DenseModel):
        resolved = resolve(model)
        model, origin = load_any(resolved), describe_origin(resolved)
    if isinstance(model, DenseModel):
        if what != "patches":
            model.task.embedding_output()  # raises: a map is no embedding of an image
        model = model.backbone
    config = model.config
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "batch.embed needs KERAS_BACKEND=tensorflow: start a new process with it, or call model.embed. "
            f"Received: KERAS_BACKEND={keras.backend.backend()}"
        )
    if what != "patches":
        model.task.embedding_output()
    if config.num_channels not in CHANNELS:
        raise ValueError(f"Image files have 1 or 3 channels. Received: a model of {config.num_channels} channels")
    if WHAT[what] == "logits" and (not config.num_classes or (config.projection_head and what != "logits")):
        raise ValueError(f"what={what!r:.200} needs a model with a head for classes. Take embeddings or features")
    return model, origin


def describe_origin(resolved: "ResolvedModel", **changes: Any) -> dict[str, Any] | None:
    """Describe the `origin` of a model that was loaded with these changes of its config; None for random weights."""
    if resolved.source is None:
        return None
    source = resolved.published.tag if resolved.published else _absolute(resolved.source)
    names = {"model": source} if resolved.name is None else {"model": resolved.name, "weights": source}
    return names | given(**changes)


def _absolute(name: str) -> str:
    return name if "://" in name else str(expand_home(name).absolute())


def fingerprint(model: "VisionTransformer | FileModel") -> str:
    """Hash a file, or the weights and the fields of the config that are not the defaults of ViTConfig."""
    if isinstance(model, FileModel):
        with model.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    from keras_vit.model.vision_transformer import hash_weights

    defaults = ViTConfig().to_dict()  # left out, so that a field of a later version changes nothing
    config = {name: value for name, value in model.config.to_dict().items() if value != defaults[name]}
    return hash_weights(model.weights, json.dumps(config, sort_keys=True))[:16]


def _best_dtype(model: "VisionTransformer") -> str:
    """Choose the model's own dtype, or bfloat16 where it is faster than float32."""
    import tensorflow as tf

    own = str(model.layers[1].compute_dtype)
    if own != "float32":
        return own
    gpus, cpu = tf.config.list_physical_devices("GPU"), Path("/proc/cpuinfo")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    flags = cpu.read_text(encoding="utf-8", errors="replace") if cpu.exists() and not gpus else ""
    is_faster = any(flag in flags for flag in CPU_FLAGS) or bool(tf.config.list_physical_devices("TPU"))
    is_faster |= bool(gpus) and all(gpu.get("compute_capability", (0, 0)) >= AMPERE for gpu in details)
    return "bfloat16" if is_faster else "float32"
