"""The commands `predict` and `visualize`: classes, maps and a report of what the model sees."""

import colorsys
import functools
import json
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument, Option

from keras_vit import zoo
from keras_vit._util.checks import given
from keras_vit._util.files import check_regular, check_results, readable_images, writing_result
from keras_vit._util.progress import track
from keras_vit._util.text import abbreviated, printable, text_lines
from keras_vit.cli import options


@options.takes(*options.MODEL_OPTIONS)
def predict(
    model: options.Model,
    images: options.Images,
    classes: Annotated[
        str | None,
        Option(help="Classify by texts instead: names with commas between, or a .txt file with one on each line."),
    ] = None,
    template: Annotated[
        list[str] | None,
        Option(help='For --classes: a text with {} in place of a name, such as "a photo of a {}."; may be repeated.'),
    ] = None,
    top: options.Top = 5,
    to: Annotated[
        Path | None, options.folder("For a model of maps: a folder for the map of each image, and a picture of it.")
    ] = None,
    task: Annotated[
        str | None,
        Option(help="For an EoMT: panoptic, instance or semantic segments; else as its images are prepared."),
    ] = None,
    batch_size: Annotated[int, options.integer(1, "Images per call, and in memory.")] = 16,
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Classify images or their pixels, by the model's own classes or by texts.

    An image that cannot be read is a line of its own, and the exit code is then 1.
    """
    files = readable_images(images)
    load: Callable[[], Any]
    has_maps, is_file = False, options.is_tflite(model)
    if is_file:
        if classes is not None:
            raise ValueError(f"--classes needs a model with texts, not a file. Received: the file {model}")
        with options.quiet(starts_tensorflow=False):
            file = options.load_file(model, **chosen)
        load, has_maps = lambda: file, file.head is not None
    elif classes is None:
        found = options.find_model(model, needs_classes=True, **chosen)
        load, has_maps = found.load, found.has_maps
    else:
        load = functools.partial(zoo.zero_shot, model, _read_classes(classes), templates=template, **given(**chosen))
    if template and classes is None:
        raise ValueError(f"--template is for --classes. Received: {template}")
    if to is not None and not has_maps:
        raise ValueError(f"--to is for models of maps, such as a run of segment-folder. Received: {model}")
    if task is not None and not has_maps:
        raise ValueError(f"--task is for an EoMT. Received: {model}")
    show = len(files) > batch_size and (as_json or not sys.stdout.isatty())  # else the results show the progress
    rows = []
    with options.quiet(starts_tensorflow=not is_file):
        from keras_vit.model.classify import classify_each

        loaded = load()
        if not has_maps and loaded.config.probabilities == "sigmoid" and not as_json:
            options.echo("The probability of each class stands for itself: they need not add up to 100 %.", err=True)
        if has_maps:
            results = map_each(loaded, files, to=to, top=top, task=task)
        elif is_file:
            results = loaded.classify_each(files, top=top)
        else:
            results = classify_each(loaded, files, top=top, batch_size=batch_size)
        for image, result in track(zip(files, results, strict=True), "Classifying", total=len(files), show=show):
            if isinstance(result, Exception) and len(files) == 1 and not as_json:
                raise result
            rows.append(_result_row(image, result))
            if not as_json:
                options.echo(_format_row(rows[-1]))
    if as_json:
        options.echo(json.dumps(rows, indent=2))
    if failed := sum("error" in row for row in rows):
        raise ValueError(f"{failed} of {len(files)} images cannot be read")


def _read_classes(text: str) -> list[str]:
    """Read names of classes that commas separate, or the lines of a .txt file."""
    if not text.endswith(".txt"):
        return [name.strip() for name in text.split(",")]
    check_regular(Path(text))
    return [line for line in text_lines(Path(text).read_bytes(), text) if line]


def _format_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return printable(f"{row['image']}: {row['error']}")
    if "depth" in row:
        depth = ", ".join(f"{name} {value:.3g}" for name, value in row["depth"].items())
        return f"{printable(row['image'])}: {depth}"
    if "segments" in row:
        scores = [f"{part['score']:.2%}" if part["score"] is not None else "" for part in row["segments"]]
        parts = [
            ("", f"{part['share']:.2%}", part["label"], f"({part['label_id']})", score)
            for part, score in zip(row["segments"], scores, strict=True)
        ]
        return f"{printable(row['image'])}\n{options.aligned(parts, right=(1, 4))}"
    lines = [("", f"{best['probability']:.2%}", best["label"], f"({best['label_id']})") for best in row["predictions"]]
    return f"{printable(row['image'])}\n{options.aligned(lines, right=(1,))}"


def _result_row(file: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"image": file, "error": str(result).removeprefix(repr(file)).removeprefix(file).lstrip(": ")}
    if isinstance(result, dict):
        return {"image": file, **result}
    return {"image": file, "predictions": [prediction._asdict() for prediction in result]}


GOLDEN = 0.618  # share of the circle between the hues of two classes: neighbours are never alike
COLOUR = 0.5  # its share in an overlay
NOT_PAINTED = ("background", "unlabeled", "unlabelled", "void")  # names of classes whose pixels an overlay leaves
MOST_VALUES = 65_535  # of 16 bits
PNG = b"\x89PNG\r\n\x1a\n"
UP = 2  # a PNG's filter of a row: less the row above
PNG_SCALES = (1000.0, 256.0)  # values per metre: millimetres as NYU, then as KITTI
# Colours from the least to the largest distance: the near is warm.
NEAR_TO_FAR = ((255, 240, 150), (250, 150, 60), (190, 50, 100), (80, 20, 120), (10, 10, 60))


def map_each(model: Any, files: list[str], *, to: Path | None, top: int, task: str | None = None) -> Iterator[Any]:
    """Yield the decoded map of each image, or why it cannot be read; write maps and pictures of them into `to`."""
    from keras_vit.dense.map_tasks import Depth
    from keras_vit.dense.segments import Segments, segment_task
    from keras_vit.model.classify import IMAGE_ERRORS

    kind = "coloured" if isinstance(model.task, Depth) else "overlay"
    if isinstance(model.task, Segments):
        segment_task(task, model.head.framing)
    elif task is not None:
        raise ValueError(f"--task is for an EoMT. Received: a model of {model.task.NAME}")
    paths = [
        (to / f"{name}.png", to / f"{name}-{kind}.png") if to else None for name in (Path(file).stem for file in files)
    ]
    if to is not None:
        if model.task.num_classes > MOST_VALUES + 1:
            raise ValueError(
                f"--to writes PNG files, which hold numbers of {MOST_VALUES + 1:,} classes: use model.predict_maps. "
                f"Received: a model of {model.task.num_classes:,} classes"
            )
        results = [path for pair in paths for path in pair or ()]
        if isinstance(model.task, Segments):
            results += [pair[0].with_suffix(".json") for pair in paths if pair]
        if repeated := sorted(path.name for path, count in Counter(results).items() if count > 1):
            raise ValueError(f"--to needs images of different names. Several would be {abbreviated(repeated)}")
        to.mkdir(parents=True, exist_ok=True)
        check_results(results, inputs=files)
    for file, pair in zip(files, paths, strict=True):
        try:
            has_segments = isinstance(model.task, Segments)
            yield _find_segments(model, file, pair, task) if has_segments else _predict_map(model, file, pair, top)
        except IMAGE_ERRORS as error:
            yield error


def _predict_map(model: Any, file: str, paths: tuple[Path, Path] | None, top: int) -> Any:
    image, pixels = _read(model, file)
    [found] = model.predict_maps(image)
    if found.dtype.kind == "f":
        scale = _depth_scale(model.task.max_depth, found)
        values = np.rint(found * scale).clip(0, MOST_VALUES).astype(np.uint16)
        picture = _depth_colours(found)
        result = {"depth": {**model.task.decode(found[None], top)[0], "values_per_unit": scale}}
    else:
        values = found.astype(np.uint8 if found.dtype == np.uint8 else np.uint16)
        names = model.task.class_names() or []
        bare = [number for number, name in enumerate(names) if name.casefold() in NOT_PAINTED]
        picture = _overlay(pixels, found, model.task.num_classes, bare)
        result = model.task.shares(found[None], top)[0]
    if paths is not None:
        write_png(paths[0], values[..., None])
        write_png(paths[1], picture)
    return result


def _read(model: Any, file: str) -> tuple[Any, np.ndarray]:
    """Read a file as an image for the model, and as bytes to paint on."""
    from keras_vit.model import preprocess

    preprocessing = model.config.preprocessing
    pixels = model.read(file) if hasattr(model, "read") else preprocess.decode(file, preprocessing=preprocessing)
    return (pixels if pixels.dtype == np.uint8 else file), pixels.astype(np.uint8)


def _find_segments(model: Any, file: str, paths: tuple[Path, Path] | None, task: str | None) -> dict[str, Any]:
    image, pixels = _read(model, file)
    [found] = model.predict_segments(image, task=task)
    rows = [{**segment._asdict(), "share": segment.area / found.ids.size} for segment in found.segments]
    if paths is not None:
        write_png(paths[0], found.ids.astype(np.uint16)[..., None])
        write_png(paths[1], _overlay(pixels, found.ids, len(rows) + 1, [0]))
        with writing_result(paths[0].with_suffix(".json")) as written:
            written.write(json.dumps({"segments": rows}, indent=2).encode())
    return {"segments": rows}


def _overlay(pixels: np.ndarray, numbers: np.ndarray, count: int, bare: list[int]) -> np.ndarray:
    """Paint the pixels of each number in a colour of its own, but for those of the `bare` ones."""
    colours = 255 * np.array([colorsys.hsv_to_rgb(number * GOLDEN % 1, 0.7, 0.95) for number in range(count)])
    shares = np.full(count, COLOUR)
    shares[bare] = 0
    share = shares[numbers][..., None]
    painted: np.ndarray = (share * colours[numbers] + (1 - share) * pixels).astype(np.uint8)
    return painted


def _depth_scale(max_depth: float | None, found: np.ndarray) -> float:
    """Choose the values per metre of a PNG file that hold the map; of a relative one, those that use all 16 bits."""
    farthest = max(float(found.max()), max_depth or 1e-6)
    scales = [scale for scale in PNG_SCALES if max_depth and scale * farthest <= MOST_VALUES]
    return [*scales, MOST_VALUES / farthest][0]


def _depth_colours(found: np.ndarray) -> np.ndarray:
    """Colour a map of depth, from its least to its largest value."""
    shares = (found - found.min()) / max(float(np.ptp(found)), 1e-6)
    places = np.linspace(0, 1, len(NEAR_TO_FAR))
    channels = [np.interp(shares, places, channel) for channel in zip(*NEAR_TO_FAR, strict=True)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 or uint16 (height, width, channels) as a PNG file, complete or not at all."""
    height, width, channels = pixels.shape
    values = pixels.astype(pixels.dtype.newbyteorder(">")).reshape(height, -1).view(np.uint8)
    rows = np.pad(np.diff(values, axis=0, prepend=np.uint8(0)), ((0, 0), (1, 0)), constant_values=UP)
    head = struct.pack(">IIBBBBB", width, height, 8 * pixels.dtype.itemsize, {1: 0, 3: 2}[channels], 0, 0, 0)
    with writing_result(path) as file:
        file.write(PNG)
        for name, content in ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")):
            check = zlib.crc32(name + content)
            file.write(struct.pack(">I", len(content)) + name + content + struct.pack(">I", check))


MAX_IMAGES = 16  # as in visualize.report_page


@options.takes(*options.MODEL_OPTIONS)
def visualize(
    model: options.Model,
    images: Annotated[list[str], Argument(help=f"Image files, folders and patterns; at most {MAX_IMAGES} are shown.")],
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    top: options.Top = 5,
    **chosen: Any,
) -> None:
    """Write one HTML file that shows predictions, attention, filters and position embeddings of a model."""
    files = options.choose_images(images, MAX_IMAGES)
    check_results([out], inputs=files)
    found = options.find_model(model, **chosen)
    published = found.resolved.published
    title = found.resolved.name or Path(model).name
    card = f"{title}, {published.tag}\n\n{published}" if published else None
    with options.quiet():
        from keras_vit.visualize.report_page import report

        loaded = found.load()
    shown = options.drop_unreadable(loaded, files)
    options.echo(str(report(loaded, shown, out, top=top, title=title, card=card, progress=True)))
