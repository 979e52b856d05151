"""Activations of published Vision Transformers, by name."""

from collections.abc import Callable
from typing import Any

from keras import ops


# ops.gelu is not exact enough: TensorFlow rounds its constants to float32 (errors of 5e-10 and 5e-9 in float64).
def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + ops.tanh(0.7978845608028654 * (x + 0.044715 * ops.power(x, 3))))


def _gelu_erf(x: Any) -> Any:
    return 0.5 * x * (1.0 + ops.erf(x / 1.4142135623730951))


def _gelu_quick(x: Any) -> Any:
    return x * ops.sigmoid(1.702 * x)


def _linear(x: Any) -> Any:
    return x


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu_tanh": _gelu_tanh,  # the default of flax.nn.gelu: Google's checkpoints
    "gelu_erf": _gelu_erf,  # the default of PyTorch: timm, Hugging Face
    "gelu_quick": _gelu_quick,  # OpenAI's CLIP
    "relu": ops.relu,
    "silu": ops.silu,
    "tanh": ops.tanh,
    "linear": _linear,
}


def activation_function(name: str) -> Callable[[Any], Any]:
    """Return the function of a name in `config.ACTIVATIONS`."""
    return _ACTIVATIONS[name]
