"""Write a report of a model and some images: one HTML file that needs no other file."""

import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from keras_vit._util import html
from keras_vit._util.atomic import replacing
from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.progress import track
from keras_vit._util.text import byte_size, scaled
from keras_vit._util.timing import timed
from keras_vit.model.classify import single_images
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.model.sizes import name_of
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import attention, figures, tokens, weights
from keras_vit.visualize._models import vision_transformer

MAX_IMAGES = 16
PICTURE_SIDE = 448  # pixels of a picture's longer side on the page
NUM_TIMED_CALLS = 5
FLOP_UNITS = (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP")
PAPER = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021 (arXiv 2010.11929)"


def report(
    model: Any,
    images: Any,
    path: str | os.PathLike[str],
    *,
    top: int = 5,
    title: str | None = None,
    card: Any = None,
    exports: Sequence[Any] = (),
    progress: bool = False,
) -> Path:
    """Write a report of a model and some images as one HTML file without links to other files. Needs matplotlib.

    It shows predictions, attention over the images, figures 6 and 7 of the paper (arXiv 2010.11929), norms and rank
    of the tokens, and the logit lens; the card and the exported files if they are given. Sections that do not apply to
    the model give the reason instead. Of a model that contains a VisionTransformer, only that part is shown.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: 1 to 16 images as `model.classify` takes them: paths, PIL images, arrays of 0..255, or a list of these.
        path: the .html file to write. An existing file is replaced when the new one is complete.
        top: number of classes to name for each image, from 1.
        title: heading of the page; None uses the model's name, or its architecture's if it has none.
        card: information on the weights: `zoo.card(name)` or other text, or a dict of names and values.
        exports: an `export.Report`, or its dict, for each file exported from this model.
        progress: whether to show a bar on standard error.

    Returns:
        The path.

    Raises:
        ImportError: if matplotlib is not installed.
        FileNotFoundError: if an image or the folder of `path` does not exist.
        ValueError: if an image cannot be read, if there are none or too many, if `top` is below 1, or if the model
            computes NaN or infinity.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.report(model, digits.load().test_images[:1], "report.html").name
        'report.html'
    """
    target = Path(as_path(path, "path"))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder for the report: {target.parent}")
    if target.is_dir():
        raise ValueError(f"path must be the .html file to write. Received: the folder {str(target)!r}")
    check_counts(top=top)
    inner = vision_transformer(model)
    names, prepared = _prepare(inner, images)
    page = _render(
        _collect(inner, prepared, top, progress=progress),
        names=names,
        title=title or (name_of(inner.config) if inner.name == "vit" else inner.name),
        part_of=None if model is inner else repr(model.name),
        card=card,
        card_lines=[] if isinstance(card, Mapping) else [(line, _indent(line)) for line in str(card).splitlines()],
        exports=[_model_row(inner, prepared[:1]), *map(_export_row, exports)] if exports else [],
    )
    with replacing(target) as file:
        file.write(page.encode())
    return target


def _prepare(model: VisionTransformer, images: Any) -> tuple[list[str], np.ndarray]:
    """Return the names of the images and the images prepared for the model."""
    items = list(single_images(images))
    if not 0 < len(items) <= MAX_IMAGES:
        raise ValueError(f"A report shows 1 to {MAX_IMAGES} images. Received: {len(items)}")
    names = [item if isinstance(item, str | os.PathLike) else f"image {i}" for i, item in enumerate(items, 1)]
    return _names(list(map(PurePath, names))), np.concatenate([model.preprocess(item) for item in items])


def _names(paths: Sequence[PurePath]) -> list[str]:
    """Return the shortest end of each path that no other path has: "x.jpg", or "a/x.jpg" beside "b/x.jpg"."""
    ends = [[str(PurePath(*path.parts[-n:])) for n in range(1, len(path.parts) + 1)] for path in paths]
    count = Counter(end for of_path in ends for end in of_path)
    unique = (next((end for end in of_path if count[end] == 1), None) for of_path in ends)
    return [name or f"{path}, image {number}" for number, (name, path) in enumerate(zip(unique, paths, strict=True), 1)]


def _collect(model: VisionTransformer, images: np.ndarray, top: int, *, progress: bool) -> dict[str, Any]:
    """Compute what a report shows of a model and prepared images; raise a ValueError for NaN or infinity."""
    config = model.config
    norms = tokens.token_norms(model, images)
    if not np.isfinite(norms).all():
        raise ValueError(
            f"{model.name!r} computes NaN or infinity from these images: there is nothing to draw. Received: "
            f"tokens that are not finite, computed in {model.layers[1].compute_dtype}"
        )
    functions: dict[str, Any] = {"rank": tokens.effective_rank, "components": tokens.patch_components}
    if config.has_attention:
        functions["rollout"] = attention.attention_rollout
        functions["attention"] = attention.class_attention  # (layers, batch, heads, rows, columns)
        functions["distance"] = attention.attention_distance
    if config.num_classes:
        functions["lens"] = tokens.logit_lens
    items = track(functions.items(), "Computing", show=progress)
    data: dict[str, Any] = {name: function(model, images) for name, function in items}
    colours, foreground = data["components"]
    lens = data.get("lens")
    return data | {
        "config": config,
        "parameters": model.count_params(),
        "pictures": [undo_preprocessing(config, image) for image in images],
        "colours": np.rint(255 * np.concatenate([colours, foreground[..., None]], axis=-1)).astype(np.uint8),
        "filters": weights.embedding_filters(model),
        "similarity": weights.position_similarity(model) if weights.has_position_embedding(config) else None,
        "norms": norms,
        "predictions": None if lens is None else model.decode_predictions(lens[-1], top),
        "leaders": None if lens is None else [[best for [best] in model.decode_predictions(x, 1)] for x in lens],
    }


def undo_preprocessing(config: ViTConfig, image: np.ndarray) -> np.ndarray:
    """Return a prepared image as the uint8 picture that the model sees; grey unless it has three channels."""
    shares = image * np.array(config.preprocessing.std) + np.array(config.preprocessing.mean)
    pixels = np.rint(255 * np.clip(shares, 0, 1))
    return (pixels if pixels.shape[-1] == 3 else np.rint(pixels.mean(axis=-1))).astype(np.uint8)


def _render(data: dict[str, Any], **values: Any) -> str:
    """Return the page of what `_collect` returns and other values of the template."""
    filters = {"data_uri": html.data_uri, "heat": figures.heat, "svg": html.svg, "times_average": figures.times_average}
    charts = {
        "distance": figures.draw_distances(data["distance"]) if "distance" in data else None,
        "filters": figures.draw_filters(data["filters"]),
        "similarity": None if data["similarity"] is None else figures.draw_similarities(data["similarity"]),
        "norms": figures.draw_norms(data["norms"], prefix_tokens=data["config"].num_prefix_tokens),
        "rank": figures.draw_ranks(data["rank"]),
    }
    template = html.environment(**filters).get_template("report.html")
    return template.render(
        data=data,
        flops=scaled(count(data["config"]).flops, 1000, FLOP_UNITS),
        pictures=[html.data_uri(html.thumbnail(picture, PICTURE_SIDE)) for picture in data["pictures"]],
        charts=charts,
        heat_scale=figures.heat_scale(),
        hottest=figures.HOTTEST,
        paper=PAPER,
        **values,
    )


def _indent(line: str) -> int:
    """Return where the second column of a line of two columns begins, at most 16; 0 for other lines."""
    first_column = re.match(r" *\S+ {2,}", line)
    return min(first_column.end(), 16) if first_column else 0


def _model_row(model: VisionTransformer, image: np.ndarray) -> tuple[Any, ...]:
    """Return the model's own row in the table of exported files."""
    size = sum(np.asarray(weight).nbytes for weight in model.weights)
    model.predict_on_batch(image)  # the first call compiles
    milliseconds = 1000 * statistics.median(timed(model.predict_on_batch, image)[1] for _ in range(NUM_TIMED_CALLS))
    return ("this model", "Keras", byte_size(size), None, None, None, f"{milliseconds:.2f}")


def _export_row(export: Any) -> tuple[Any, ...]:
    fields = export if isinstance(export, Mapping) else export.to_dict()
    path = Path(fields["path"])
    kind = "TFLite" if path.suffix == ".tflite" else "SavedModel"
    return (
        path.name if path.suffix else "/".join(path.parts[-2:]),
        kind if fields.get("mode") in (None, "none") else f"{kind}, {fields['mode']}",
        byte_size(fields["bytes"]),
        f"{fields['cosine']:.6f}",
        "equal" if fields["sqnr"] is None else f"{fields['sqnr']:.1f}",
        f"{fields['agreement']:.1%}",
        f"{fields['milliseconds']:.2f}",
    )
