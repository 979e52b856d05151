"""The command `keras-vit gallery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gallery(
    out: Annotated[Path, typer.Option(help="The folder to write into; other files in it stay.")] = Path("site"),
) -> None:
    """Every model of the zoo as one page of HTML: search, order, accuracy against arithmetic. Needs no network."""
    from keras_vit.zoo import gallery as pages

    typer.echo(str(pages.write(out)))
