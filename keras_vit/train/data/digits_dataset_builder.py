"""Build the handwritten digits as a data set of tensorflow-datasets, without a download.

tensorflow-datasets looks for a builder in a module of this name. Importing it registers `tfds.load("digits")`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from keras_vit import digits


class Builder(tfds.core.GeneratorBasedBuilder):
    """Scikit-learn's digits in the splits of `keras_vit.digits`: 1,437 training and 360 test images."""

    name = "digits"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "The split of keras_vit.digits."}

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(8, 8, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=digits.__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        data = digits.load()
        return {
            "train": self._generate_examples(data.train_images, data.train_labels),
            "test": self._generate_examples(data.test_images, data.test_labels),
        }

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from enumerate({"image": image, "label": label} for image, label in zip(images, labels, strict=True))
