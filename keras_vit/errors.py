"""The errors of the package: every one is a KerasViTError and a built-in error of its kind."""

from __future__ import annotations

__all__ = [
    "CardError",
    "CheckpointError",
    "ConverterError",
    "Diverged",
    "DownloadError",
    "KerasViTError",
    "FileUnavailableError",
    "UnknownModel",
    "VerificationError",
]


class KerasViTError(Exception):
    """Base of all errors of the package: `except keras_vit.errors.KerasViTError` catches each of them."""


class CheckpointError(KerasViTError, ValueError):
    """A checkpoint is damaged, hostile, not of the expected format, or cannot express the model."""


class DownloadError(KerasViTError, OSError):
    """A file could not be downloaded completely and verified."""


class FileUnavailableError(DownloadError):
    """The file does not exist at its source, access is denied, or the package is offline."""


class CardError(KerasViTError, ValueError):
    """A model card in `zoo/` is not valid."""


class UnknownModel(KerasViTError, ValueError):  # noqa: N818 - public since the first version
    """No card has this model name, or the card has no weights with this tag."""


class VerificationError(KerasViTError, ValueError):
    """An exported file differs from its model by more than its mode allows."""


class ConverterError(KerasViTError, ValueError):
    """TensorFlow's own TFLite converter failed or timed out."""


class Diverged(KerasViTError, ArithmeticError):  # noqa: N818 - public since the first version
    """Training ended with a loss, gradient or weight that is not finite."""
