"""Load scikit-learn's handwritten digits: 1,797 images that need no download, in a fixed split.

The embedded model was trained on the training split; its card, the demo and the tests measure on the test split.
"""

from dataclasses import dataclass

import numpy as np

from keras_vit._util.text import needs_extra

__all__ = ["Digits", "load"]

SPLIT_SEED = 0
TEST_SIZE = 360  # one image is 0.28 % of accuracy


@dataclass(frozen=True)
class Digits:
    """The digits 0 to 9 as colour images, which the `preprocess` of any model takes.

    Args:
        train_images: uint8 (1437, 8, 8, 3), 0..255, three equal channels.
        train_labels: int64 (1437,), 0..9.
        test_images: uint8 (360, 8, 8, 3), held out.
        test_labels: int64 (360,), 0..9.

    Example:
        >>> from keras_vit import digits
        >>> digits.load().test_labels.shape
        (360,)
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """Load the digits from scikit-learn (the test set of UCI's "Optical Recognition of Handwritten Digits").

    The split is stratified and always the same (`SPLIT_SEED`). scikit-learn has to be installed.

    Example:
        >>> from keras_vit import digits
        >>> digits.load().test_images.shape
        (360, 8, 8, 3)
    """
    with needs_extra("The data set of digits", "demo"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    grey, labels = load_digits(return_X_y=True)  # (1797, 64), 0..16
    images = np.round(grey * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1).repeat(3, axis=-1)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_SIZE, stratify=labels, random_state=SPLIT_SEED
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def __dir__() -> list[str]:
    return __all__
