"""The command `keras-vit visualize`."""

import warnings
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from keras_vit._util.image_paths import image_files
from keras_vit.cli import options

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
    files = image_files(images)
    if len(files) > MAX_IMAGES:
        warnings.warn(f"the report shows {MAX_IMAGES} of the {len(files):,} images, evenly chosen", stacklevel=2)
        files = [files[place * len(files) // MAX_IMAGES] for place in range(MAX_IMAGES)]
    found = options.find_model(model, **chosen)
    published = found.choice.published
    title = found.choice.name or Path(model).name
    card = f"{title}, {published.tag}\n\n{published}" if published else None
    with options.quiet():
        from keras_vit.visualize.report_page import report

        loaded = found.load()
    shown = options.drop_unreadable(loaded, files)
    options.echo(str(report(loaded, shown, out, top=top, title=title, card=card, progress=True)))
