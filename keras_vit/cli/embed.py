"""The command `keras-vit embed`."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from keras_vit._util.image_paths import MAX_BYTES
from keras_vit.cli import options

SOURCE_HELP = "A folder, a pattern, a .txt or .parquet file of paths or URLs, or files of records."


@options.takes(*options.MODEL_OPTIONS)
def embed(
    model: options.Model,
    source: Annotated[str, Argument(help=SOURCE_HELP)],
    to: Annotated[Path, Option(help="The folder for the Parquet files. A stopped run in it is continued.")],
    what: Annotated[
        str, Option(help="embeddings, features, logits, probabilities, classes or patches.")
    ] = "embeddings",
    dtype: Annotated[str, Option(help="auto (bfloat16 where it is fast), float32 or bfloat16.")] = "auto",
    output_dtype: Annotated[str, Option(help="Of the values: float32 or float16.")] = "float32",
    batch_size: Annotated[int, options.integer(1, "Images per call; 128 or more for a GPU.")] = 16,
    rows_per_file: Annotated[int, options.integer(1, "Images per Parquet file.")] = 4096,
    max_bytes: Annotated[int, options.integer(1, "Of an image file; a larger one is a row with an error.")] = MAX_BYTES,
    shard: Annotated[str, Option(help="i/n: every n-th file from file i, for one of n processes.")] = "0/1",
    retry_errors: Annotated[bool, Option("--retry-errors", help="Compute files that have errors again.")] = False,
    engine: Annotated[str, Option(help="local, or ray for all nodes of a Ray cluster.")] = "local",
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Write the embeddings or predictions of any number of images to Parquet files: path, values, error."""
    found = options.find_model(model, **chosen)
    with options.quiet():
        from keras_vit import batch
        from keras_vit.batch._embed import origin_of

        result = batch.embed(
            found.load(),
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
            origin=origin_of(found.choice, image_size=chosen["image_size"], patch_size=chosen["patch_size"]),
        )
    text = f"{result.path}: {result.rows:,} rows, {result.errors:,} with an error"
    options.echo(json.dumps(result._asdict(), default=str) if as_json else text)
    if result.rows == result.errors:
        raise ValueError(f"{result.path}: none of the {result.rows:,} images could be read")
