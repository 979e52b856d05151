"""Write the LiteRT file of a text tower, with its tokenizer and a test vector for apps beside it."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import keras
import numpy as np

from keras_vit._util.files import check_results, record_results, temporary_path, writing_result
from keras_vit._util.progress import timed
from keras_vit.errors import VerificationError
from keras_vit.export import modes
from keras_vit.export.exported import find_problems, load_exported, read_structure
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.metadata import MODEL, append_files
from keras_vit.export.litert.operators import STORAGES
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.outliers import find_outliers
from keras_vit.export.report import Report
from keras_vit.export.sizes import find_size_problems
from keras_vit.export.verification import check_thresholds, compare
from keras_vit.model.classify import unit_length
from keras_vit.model.tokenizer import Tokenizer
from keras_vit.text.encoder import TextEncoder

MODES = ("none", "float16", "dynamic")  # those that need no calibration
TEXTS = (
    "a photo of a cat",
    "Two dogs run along the beach.",
    "",
    "the number 7, in red",
    "rocket",
    "soup, bread & butter",
    "Café, 3 €",
)


def tflite(
    encoder: TextEncoder,
    path: str | os.PathLike[str],
    *,
    quantize: str = "dynamic",
    texts: Sequence[str] = TEXTS,
    threads: int = 2,
) -> Report:
    """Write a LiteRT file with the signature `ids` -> `features`, run it, and compare it with the encoder.

    `ids` is int32 (1, config.max_length), `features` float32 (1, config.width), not of length 1. Two files are written
    beside it for an app's own tokenizer: the tokenizer's model (tokenizer.json, or SigLIP's spiece.model), and
    NAME.test.json with the `texts`, their `ids` and the encoder's `embeddings` of length 1.

    Args:
        encoder: a TextEncoder with its tokenizer.
        path: path of the file. It appears complete and verified, or not at all; an earlier export there is replaced.
        quantize: "none", "float16", or "dynamic" (int8 kernels and an int8 table of tokens).
        texts: texts on which the file and the encoder are compared, two or more that have different ids.
        threads: number of threads on which the file is timed.

    Returns:
        The comparison; its `images` are texts.

    Raises:
        TypeError: `encoder` is no text encoder.
        ValueError: the encoder has no tokenizer, the mode is another, or `texts` do not differ.
        VerificationError: the file does not compute what the encoder does.
        FileNotFoundError, IsADirectoryError: `path` cannot be a file.
        FileExistsError: the folder has the tokenizer of another model, or files of these names that keras_vit has not
            written.
        ImportError: the packages of `pip install "keras-vit-zoo[litert]"` are missing.

    Example:
        >>> report = keras_vit.text.tflite(keras_vit.zoo.text_encoder("digits"), "digits-text.tflite")
        >>> report.mode, report.difference_cosine > 0.99
        ('dynamic', True)
    """
    if quantize not in MODES:
        raise ValueError(f"quantize must be one of {list(MODES)}. Received: {quantize!r:.200}")
    if not isinstance(encoder, TextEncoder):
        raise TypeError(f"The model must be a TextEncoder. Received: {type(encoder).__name__}")
    path, mode = Path(path), modes.load_mode(quantize)
    ids = encoder.tokenize(texts)
    if len(np.unique(ids, axis=0)) < 2:
        raise ValueError(f"texts must be two or more that have different ids. Received: {texts!r:.200}")
    tokenizer = cast(Tokenizer, encoder.tokenizer)  # which has tokenized the texts
    model, beside = tokenizer.model, path.parent / tokenizer.file_name
    if path.name == beside.name:
        raise ValueError(f"{path.name} is the tokenizer's file, which is written beside the model: choose another name")
    if beside.exists() and beside.read_bytes() != model:
        raise FileExistsError(f"{beside} is another model's tokenizer: write into a folder of its own")
    test_vector = path.with_suffix(".test.json")
    check_results([path, test_vector])
    with temporary_path(path) as work:
        outliers = find_outliers(encoder, ids, mode.smoothing)
        build_file(encoder, FilePlan(storage=STORAGES[mode.storage], **outliers._asdict())).write(work)
        problems = find_problems(read_structure(work))
        problems += find_size_problems(work, encoder, mode, encoder.input_shape[1:])
        if problems:
            raise VerificationError(f"{work} {'; it '.join(problems)}")
        file = load_exported(work, threads)
        expected = keras.ops.convert_to_numpy(encoder(ids))
        results = [timed(file.call, row[None]) for row in ids]
        received = np.concatenate([outputs["features"] for outputs, _ in results])
        if not np.isfinite(received).all():
            raise VerificationError(f"{work} computes NaN or infinity")
        report = Report(
            path=work,
            bytes=work.stat().st_size,
            **compare(encoder.task, {"features": expected}, {"features": received}),
            milliseconds=1000 * float(np.median([seconds for _, seconds in results])),
            threads=threads,
            mode=mode.name,
        )
        report = check_thresholds(report, mode, has_classes=False)
        text = {"length": tokenizer.length, "file": tokenizer.file_name, **tokenizer.facts}
        append_files(work, {MODEL: json.dumps({"text": text}) + "\n"})
        if not beside.exists():
            beside.write_bytes(model)
        vector = {"texts": list(texts), "ids": ids.tolist(), "embeddings": unit_length(expected).tolist()}
        content = json.dumps({**vector, **tokenizer.facts}, ensure_ascii=False)
        with writing_result(test_vector) as written:
            written.write(content.encode())
        work.replace(path)
        record_results(path)
    return dataclasses.replace(report, path=path)
