"""The command `keras-vit search`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from keras_vit._util.image_paths import is_image
from keras_vit.cli import options

if TYPE_CHECKING:
    from keras_vit.batch.folder import Folder

ORIGIN = ("model", "weights", "image_size", "patch_size")  # arguments of `find_model` that _run.json has


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
    accept_licence: options.Licence = False,
    as_json: options.Json = False,
) -> None:
    """Find the images of a folder of embeddings that are nearest to a text or an image."""
    if out and not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no folder for the contact sheet: {out.parent}")
    if not query.strip():
        raise ValueError(f"The query must be a text or an image file. Received: {query!r:.200}")
    with options.quiet():
        from keras_vit import batch
        from keras_vit.batch._search import write_contact_sheet
        from keras_vit.batch.folder import find_folder

        folder = find_folder(vectors.expanduser())
        chosen = {"model": model, "weights": weights} if model else _origin(folder, weights)
        [found] = batch.search(
            vectors, _embedding(query, folder, chosen, accept_licence, is_stated=bool(model)), top=top
        )
        if out:
            write_contact_sheet(out, query, folder, found)
    if as_json:
        options.echo(json.dumps([match._asdict() for match in found], indent=2))
    elif found:
        options.echo(options.aligned([(f"{match.score:.3f}", str(match.path)) for match in found]))
    if not found:
        raise ValueError(f"{vectors} has no image that could be read")


def _origin(folder: Folder, weights: str | None) -> dict[str, Any]:
    """Return the arguments of `find_model` that the record has; raise a ValueError if it has none."""
    origin = folder.record.get("model")
    if weights is not None or not isinstance(origin, dict) or "model" not in origin or {*origin} - {*ORIGIN}:
        reason = "--weights is for --model" if weights else f"{folder.path} does not say of which model its vectors are"
        raise ValueError(f"{reason}: pass --model, and --weights as for keras-vit embed")
    return origin


def _embedding(query: str, folder: Folder, chosen: dict[str, Any], accept_licence: bool, *, is_stated: bool) -> Any:
    """Return the embedding of a text or an image by the model of the vectors, (1, width)."""
    from keras_vit import zoo
    from keras_vit.batch._embed import fingerprint

    is_text = not (is_image(query) or "://" in query or Path(query).expanduser().is_file())
    if is_stated or not is_text:
        loaded = options.find_model(**chosen, accept_licence=accept_licence).load()
        if fingerprint(loaded) != folder.record["weights"]:
            raise ValueError(
                f"{folder.path} has the embeddings of another model than {chosen['model']}: of other weights, another "
                "image size or other preprocessing. Pass the --model and --weights that keras-vit embed was given"
            )
        if not is_text:
            return loaded.embed([query])
    return zoo.text_encoder(chosen["model"], weights=chosen.get("weights")).embed([query])
