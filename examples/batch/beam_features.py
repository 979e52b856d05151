"""Compute features with Apache Beam. Workers need apache-beam and tensorflow, and see the SavedModel and the images.

python beam_features.py MODEL "IMAGES/**" OUT [--runner=DataflowRunner ...]
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
import tensorflow as tf
from apache_beam.io.fileio import MatchFiles, ReadMatches
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

Row = tuple[list[float] | None, str | None]  # features or None, error or None
SCHEMA = pa.schema({"path": pa.string(), "features": pa.list_(pa.float32()), "error": pa.string()})


class Features(ModelHandler[bytes, Row, Any]):
    """Calls the signature `features` of a SavedModel. Beam's own handler for TensorFlow opens Keras models only."""

    def __init__(self, model: str) -> None:
        super().__init__(max_batch_size=32)
        self._model = model

    def load_model(self) -> Any:
        """Load the model, once for each worker."""
        return tf.saved_model.load(self._model)

    def run_inference(self, batch: Sequence[bytes], model: Any, inference_args: Any = None) -> Iterable[Row]:
        """Return a row for each image."""
        try:
            found = model.signatures["features"](image_bytes=tf.constant(batch))["features"].numpy()
            return [(row.tolist(), None) for row in found]
        except tf.errors.InvalidArgumentError as error:  # of a bad image, and of the batch that it is in
            if len(batch) == 1:
                return [(None, error.message.splitlines()[-1])]
            return [row for file in batch for row in self.run_inference([file], model)]


if __name__ == "__main__":
    model, images, out, *options = sys.argv[1:]
    with beam.Pipeline(options=PipelineOptions(options, save_main_session=True)) as pipeline:
        files = pipeline | MatchFiles(images) | ReadMatches()
        keyed = files | beam.Map(lambda file: (file.metadata.path, file.read()))
        rows = keyed | RunInference(KeyedModelHandler(Features(model)))
        named = rows | beam.MapTuple(lambda path, row: {"path": path, "features": row[0], "error": row[1]})
        named | beam.io.WriteToParquet(out, SCHEMA, file_name_suffix=".parquet")
