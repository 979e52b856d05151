"""The commands `embed` and `search`: vectors of many images, and the nearest of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from keras_vit._util.checks import as_path, expand_home
from keras_vit._util.files import MAX_BYTES, check_results, is_image
from keras_vit._util.text import warn
from keras_vit.cli import options

if TYPE_CHECKING:
    from keras_vit.batch.folder import Folder
    from keras_vit.text import TextEncoder

# Arguments of `find_model` that _run.json has.
ORIGIN = ("model", "weights", "which", "config", "image_size", "patch_size")
SOURCE_HELP = "Folders, images, patterns, .txt or .parquet files of paths or URLs, or files of records."
LEAST_COSINE = 0.99  # between a model's vectors and those of its int8 file, which are then compared with each other
CHECKED = 100_000  # images that a search compares with those that were embedded: in a second from a local disk


@options.takes(*options.MODEL_OPTIONS)
def embed(
    model: options.Model,
    source: Annotated[list[str], Argument(help=SOURCE_HELP)],
    to: Annotated[Path, options.folder("The folder for the Parquet files. A stopped run in it is continued.")],
    what: Annotated[
        str, Option(help="embeddings, features, logits, probabilities, classes or patches.")
    ] = "embeddings",
    dtype: Annotated[
        str, Option(help="auto (bfloat16 where it is fast), float32, bfloat16, or int8 for CPUs.")
    ] = "auto",
    output_dtype: Annotated[str, Option(help="Of the values: float32 or float16.")] = "float32",
    batch_size: Annotated[int, options.integer(1, "Images per call; 128 or more for a GPU.")] = 16,
    rows_per_file: Annotated[
        int | None, options.integer(1, "Images per Parquet file; default: 4096, or as in the folder.")
    ] = None,
    max_bytes: Annotated[int, options.integer(1, "Of an image file; a larger one is a row with an error.")] = MAX_BYTES,
    shard: Annotated[str, Option(help="i/n: every n-th file from file i, for one of n processes.")] = "0/1",
    retry_errors: Annotated[bool, Option("--retry-errors", help="Compute files that have errors again.")] = False,
    engine: Annotated[str, Option(help="local, or ray for all nodes of a Ray cluster.")] = "local",
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Write the embeddings or predictions of any number of images to Parquet files: path, values, error."""
    is_file = options.is_tflite(model)
    found = None if is_file else options.find_model(model, **chosen)
    try:
        with options.quiet(starts_tensorflow=not is_file):
            from keras_vit import batch
            from keras_vit.batch._embed import describe_origin
            from keras_vit.batch.folder import first_error

            recorded = {name: chosen[name] for name in ("which", "config", "image_size", "patch_size")}
            result = batch.embed(
                found.load() if found else options.load_file(model, **chosen),
                source,
                to=to,
                what=what,
                dtype=dtype,
                output_dtype=output_dtype,
                batch_size=batch_size,
                rows_per_file=rows_per_file,
                max_bytes=max_bytes,
                shard=shard,
                retry_errors=retry_errors,
                engine=engine,
                origin=describe_origin(found.resolved, **recorded) if found else None,
            )
    except KeyboardInterrupt:
        if to.is_dir():
            options.echo(f"Stopped. The same command goes on in {to}", err=True)
        raise
    text = f"{result.path}: {result.rows:,} rows, {result.errors:,} with an error"
    options.echo(json.dumps(result._asdict(), default=str) if as_json else text)
    if result.rows == result.errors:
        first = first_error(result.path)
        raise ValueError(f"{result.path}: none of the {result.rows:,} images could be read. The first: {first}")


def search(
    vectors: Annotated[Path, Argument(help="A folder of embeddings that keras-vit embed has written.")],
    query: Annotated[str, Argument(help="A text, or an image file.")],
    top: Annotated[int, options.integer(1, "Number of images.")] = 20,
    out: Annotated[Path | None, Option(help="An HTML file to write: the images found, with scores.")] = None,
    model: Annotated[
        str | None,
        Option(help="The model of the vectors; default: as the folder says.", autocompletion=options.complete_model),
    ] = None,
    weights: options.Weights = None,
    accept_license: options.License = False,
    as_json: options.Json = False,
) -> None:
    """Find the images of a folder of embeddings that are nearest to a text or an image."""
    if out is not None:
        check_results([out], inputs=[query])
    if not query.strip():
        raise ValueError(f"The query must be a text or an image file. Received: {query!r:.200}")
    from keras_vit.batch.folder import find_folder

    folder = find_folder(expand_home(as_path(vectors, "vectors")))
    chosen: dict[str, Any] = {"model": model, "weights": weights} if model else _read_origin(folder, weights)
    with options.quiet(starts_tensorflow=not options.is_tflite(chosen["model"])):
        from keras_vit import batch
        from keras_vit.batch._search import write_contact_sheet

        embedding, preprocessing = _embed_query(query, folder, chosen, accept_license)
        [found] = batch.search(vectors, embedding, top=top)
        _warn_changed(folder)
        if out:
            write_contact_sheet(out, query, folder, found, preprocessing)
    if as_json:
        options.echo(json.dumps([match._asdict() for match in found], indent=2))
    elif found:
        options.echo(options.aligned([(f"{match.score:.3f}", str(match.path)) for match in found]))
    if not found:
        raise ValueError(f"{vectors} has no image that could be read")


def _read_origin(folder: Folder, weights: str | None) -> dict[str, Any]:
    """Read the arguments of `find_model` in the record, or raise a ValueError if it has none."""
    origin = folder.record.get("model")
    if weights is not None or not isinstance(origin, dict) or "model" not in origin or {*origin} - {*ORIGIN}:
        reason = "--weights is for --model" if weights else f"{folder.path} does not say of which model its vectors are"
        raise ValueError(f"{reason}: pass --model, and --weights as for keras-vit embed")
    return origin


def _embed_query(query: str, folder: Folder, chosen: dict[str, Any], accept_license: bool) -> tuple[Any, Any]:
    """Embed a text or an image by the model of the vectors, (1, width), and find the model's preprocessing."""
    from keras_vit.batch._embed import fingerprint

    is_text = not (is_image(query) or "://" in query or _is_file(query))
    texts: TextEncoder | None = None
    loaded: Any
    if options.is_tflite(chosen["model"]):
        if is_text:
            raise ValueError(f"{chosen['model']} is a file for images: search with an image file. Received: {query!r}")
        loaded = options.load_file(**chosen)
    else:
        texts = _load_text_encoder(folder, chosen) if is_text else None
        loaded = options.find_model(**chosen, accept_license=accept_license).load()
    if fingerprint(loaded) != folder.record["weights"]:
        raise ValueError(
            f"{folder.path} has the embeddings of another model than {chosen['model']} is now: of other weights, "
            "another image size or other preprocessing. Pass the --model and --weights that keras-vit embed was given, "
            "or embed the images again into a new folder"
        )
    cosine = min(folder.record.get("int8", {}).get(name, 1.0) for name in ("cosine", "difference_cosine"))
    if cosine < LEAST_COSINE:
        raise ValueError(
            f"{folder.path} has int8 vectors, whose cosine to the model's is {cosine:.3f}: a comparison with a query "
            f"needs at least {LEAST_COSINE}. Embed the images again, without --dtype int8"
        )
    return (texts or loaded).embed([query]), loaded.config.preprocessing


def _is_file(query: str) -> bool:
    try:
        return expand_home(as_path(query, "query")).is_file()
    except ValueError:  # no file can have this name: a long text, or one such as "~5 red cars"
        return False


def _load_text_encoder(folder: Folder, chosen: dict[str, Any]) -> TextEncoder:
    """Load the text half of the model of the vectors; raise a ValueError if it has none."""
    from keras_vit import zoo

    try:
        return zoo.text_encoder(chosen["model"], weights=chosen.get("weights"), which=chosen.get("which"))
    except ValueError as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"{folder.path} has the embeddings of {chosen['model']}, and no text can be compared with them: {reason}. "
            "Search with an image file, or embed with a model of images and texts, such as CLIP-B/16 or SigLIP2-B/16"
        ) from error


def _warn_changed(folder: Folder) -> None:
    """Warn if the images are not those that were embedded; not if they are many, or elsewhere."""
    if folder.record["images"] > CHECKED:
        return
    try:
        changes, stale = folder.describe_changes(), folder.stale()
    except (OSError, ValueError, ImportError):  # nothing is at the source
        return
    if changes:
        advice = "To search in them, embed into a new folder"
        warn(f"{folder.path}: the source has other images than were embedded: {changes}. {advice}")
    elif stale:
        example = f"{len(stale):,}, such as {folder.file(stale[0]).name}"
        advice = "The same keras-vit embed computes them again"
        warn(f"{folder.path} has files with the vectors of images that have changed: {example}. {advice}")
