"""Compute features with Spark. Workers need tensorflow, pandas and pyarrow, and see the SavedModel and the images.

spark-submit spark_features.py MODEL IMAGES OUT
"""

import sys
from collections.abc import Iterator

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf

MODEL, IMAGES, OUT = sys.argv[1:]
BATCH = 32
# pandas_udf needs a session.
spark = SparkSession.builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH).getOrCreate()


@pandas_udf("features array<float>, error string")
def features(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
    """Yield a row for each image."""
    import tensorflow as tf  # on the workers only; the model is loaded once for each partition

    call = tf.saved_model.load(MODEL).signatures["features"]

    def compute(files: list[bytes]) -> list[tuple[list[float] | None, str | None]]:
        try:
            return [(row.tolist(), None) for row in call(image_bytes=tf.constant(files))["features"].numpy()]
        except tf.errors.InvalidArgumentError as error:  # of a bad image, and of the batch that it is in
            if len(files) == 1:
                return [(None, error.message.splitlines()[-1])]
            return [row for file in files for row in compute([file])]

    for files in batches:
        yield pd.DataFrame(compute(files.tolist()) if len(files) else [], columns=["features", "error"])


files = spark.read.format("binaryFile").option("recursiveFileLookup", True).load(IMAGES)
rows = files.withColumn("row", features("content")).select("path", "row.features", "row.error")
rows.write.parquet(OUT)
