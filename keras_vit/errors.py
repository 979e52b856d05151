"""The errors of the package. Each is a KerasViTError and a built-in error of its kind.

Example:
    >>> try:
    ...     keras_vit.zoo.load("digit")
    ... except keras_vit.errors.KerasViTError as error:
    ...     print(error)
    No model has this name; the nearest are ['ViT-digits', ...]. Received: 'digit'
"""

__all__ = [
    "CardError",
    "CheckpointError",
    "DivergedError",
    "DownloadError",
    "FileUnavailableError",
    "KerasViTError",
    "LicenseError",
    "OverwrittenFileError",
    "UnknownModelError",
    "VerificationError",
]


class KerasViTError(Exception):
    """Base class of all errors of the package."""

    def __str__(self) -> str:
        """Return the message; a line that quotes a name of 100,000 letters is cut."""
        lines = super().__str__().split("\n")
        return "\n".join(line if len(line) <= 2000 else f"{line[:1500]} ... {line[-400:]}" for line in lines)


class CheckpointError(KerasViTError, ValueError):
    """A checkpoint is damaged, malicious, not of the expected format, or cannot express the model."""


class DownloadError(KerasViTError, OSError):
    """A file could not be downloaded completely and verified."""


class FileUnavailableError(DownloadError):
    """The file does not exist at its source, access is denied, or the package is offline."""


class LicenseError(KerasViTError, PermissionError):
    """The publisher's own terms must be accepted before the file is downloaded; the message has their address."""


class CardError(KerasViTError, ValueError):
    """A model card in `zoo/` is invalid; the message lists everything that is wrong."""


class UnknownModelError(KerasViTError, ValueError):
    """No card has this model name, or the model has no published weights; the message lists the nearest models."""


class VerificationError(KerasViTError, ValueError):
    """The outputs of an exported file differ from its model's by more than its mode allows."""


class DivergedError(KerasViTError, ArithmeticError):
    """Training ended because a loss, gradient or weight is not finite."""


class OverwrittenFileError(KerasViTError, RuntimeError):
    """A .tflite file was overwritten while it was in use."""
