"""Base of the layers, and the small ones: activations, normalizations, dropout."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers import runtime
from keras_vit.model.layers.runtime import Shape, Tensor

# As in the paper's code: vit_jax/models_vit.py, models_resnet.py; big_vision for the probe.
_INITIALIZERS: dict[str, Callable[[], keras.initializers.Initializer]] = {
    "convolution": lambda: keras.initializers.LecunNormal(),  # truncated, as flax's lecun_normal
    "dense": lambda: keras.initializers.GlorotUniform(),
    "dense_bias": lambda: keras.initializers.RandomNormal(stddev=1e-6),
    "position": lambda: keras.initializers.RandomNormal(stddev=0.02),
    "register": lambda: keras.initializers.RandomNormal(stddev=1e-6),
}


def initializer(name: str) -> keras.initializers.Initializer:
    """Initializer of a kind of weight, a key of `_INITIALIZERS`; zeros inside `runtime.uninitialized`."""
    return keras.initializers.Zeros() if runtime.settings().uninitialized else _INITIALIZERS[name]()


def glorot_uniform_matrix(fan_in: int, fan_out: int) -> keras.initializers.Initializer:
    """Glorot uniform for a (fan_in, fan_out) matrix whose variable has another shape (an axis for heads)."""
    if runtime.settings().uninitialized:
        return keras.initializers.Zeros()
    limit = (6 / (fan_in + fan_out)) ** 0.5
    return keras.initializers.RandomUniform(-limit, limit)


def refuse_quantize(self: keras.layers.Layer, *arguments: Any, **options: Any) -> None:
    """Raise a NotImplementedError, in place of Keras' method `quantize`; a model around ours then skips the layer.

    Args:
        *arguments, **options: of Keras' method.
    """
    del arguments, options
    raise NotImplementedError(
        f"Keras' `quantize` is not for keras_vit's models and layers. Received: {self.path or self.name}. For a small "
        'file use keras_vit.export.tflite(model, path, quantize="dynamic")'
    )


def load_beside_lora(layer: Any, load: Callable[[Any], None], store: Any) -> None:
    """Load a dense layer's variables with Keras' method, and draw the first matrix of its LoRA anew.

    Keras sets both matrices to 0, for the file has their product in its kernel. Then neither would get a gradient.
    """
    load(store)
    if layer.lora_enabled:
        first = layer.lora_kernel_a
        first.assign(keras.initializers.HeUniform()(first.shape, first.dtype))  # as enable_lora draws it


class DenseRules(keras.layers.Layer):
    """Base of dense layers, inherited before Keras' Dense or EinsumDense: no `quantize`, and LoRA that loads."""

    quantize = refuse_quantize

    def load_own_variables(self, store: Any) -> None:
        load_beside_lora(self, super().load_own_variables, store)


def dense_layer(units: int, **options: Any) -> keras.layers.Dense:
    """Make a Keras Dense with the rules of `DenseRules`; its class stays Keras' own, as in saved files."""
    layer = keras.layers.Dense(units, **options)
    layer.quantize = functools.partial(refuse_quantize, layer)
    layer.load_own_variables = functools.partial(load_beside_lora, layer, layer.load_own_variables)
    return layer


class BaseLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input; an argument of `__init__` must be an attribute of that name."""

    def compute_output_shape(self, input_shape: Shape, *_: Any) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        kinds = [kind for kind in type(self).mro() if issubclass(kind, BaseLayer) and "__init__" in vars(kind)]
        names = [name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters]
        arguments = {name: getattr(self, name) for name in names if name not in ("self", "kwargs")}
        return {**super().get_config(), **arguments}


# ops.gelu is not exact enough: TensorFlow rounds its constants to float32 (errors of 5e-10 and 5e-9 in float64).
def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.tanh(0.7978845608028654 * (x + 0.044715 * ops.power(x, 3))))


def _gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.erf(x / 1.4142135623730951))


def _gelu_quick(x: Tensor) -> Tensor:
    return x * ops.sigmoid(QUICK_SLOPE * x)


LEAKY_SLOPE = 0.01  # PyTorch's
QUICK_SLOPE = 1.702  # OpenAI's


def _leaky_relu(x: Tensor) -> Tensor:
    return ops.maximum(x, LEAKY_SLOPE * x)


def _linear(x: Tensor) -> Tensor:
    return x


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu_tanh": _gelu_tanh,  # the default of flax.nn.gelu: Google's checkpoints
    "gelu_erf": _gelu_erf,  # the default of PyTorch: timm, Hugging Face
    "gelu_quick": _gelu_quick,  # OpenAI's CLIP
    "relu": ops.relu,
    "relu6": ops.relu6,
    "leaky_relu": _leaky_relu,
    "silu": ops.silu,
    "hard_swish": ops.hard_silu,
    "sigmoid": ops.sigmoid,
    "tanh": ops.tanh,
    "linear": _linear,
}


def activation_function(name: str) -> Callable[[Any], Any]:
    """Function of a name in `config.ACTIVATIONS`."""
    return _ACTIVATIONS[name]


@keras.saving.register_keras_serializable("keras_vit")
class LayerNormalization(keras.layers.LayerNormalization):
    """Keras' LayerNormalization of the last axis, which `runtime` can observe, and compile as one if `is_fused`.

    `is_rms`: an RMSNorm, which divides by the root mean square, and has a gain alone (arXiv 1910.07467).
    """

    axis: Any

    def __init__(self, *, epsilon: float = 1e-6, is_rms: bool = False, is_fused: bool = False, **kwargs: Any) -> None:
        super().__init__(epsilon=epsilon, **kwargs, **({"center": False} if is_rms else {}))
        self.is_rms = is_rms
        self.is_fused = is_fused

    def build(self, input_shape: Shape) -> None:
        axis = self.axis
        super().build(input_shape)
        self.axis = axis  # Keras 3.16 would count it from the front, and the final norm reads inputs of two ranks

    def call(self, inputs: Tensor) -> Tensor:
        runtime.observe(self.path, inputs)
        normalize = self._divide_by_rms if self.is_rms else super().call
        return runtime.layer_norm(self, normalize, inputs) if self.is_fused else normalize(inputs)

    def _divide_by_rms(self, x: Tensor) -> Tensor:
        return ops.cast(runtime.divide_by_rms(x, self.gamma, epsilon=self.epsilon), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "is_rms": self.is_rms, "is_fused": self.is_fused}
        if self.is_rms:
            del config["center"]  # `is_rms` says it
        return config


@keras.saving.register_keras_serializable("keras_vit")
class LayerScale(BaseLayer):
    """Multiply every channel by a learned factor that starts small (CaiT, arXiv 2103.17239)."""

    def __init__(self, initial: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape: Shape) -> None:
        constant = keras.initializers.Constant(self.initial)
        self.gamma = self.add_weight(shape=(input_shape[-1],), initializer=constant, name="gamma")

    def call(self, x: Tensor) -> Tensor:
        return x * self.gamma


@keras.saving.register_keras_serializable("keras_vit")
class L2Normalization(BaseLayer):
    """Divide each feature by its Euclidean norm. A feature of zeros stays zero, and its gradient is finite."""

    def call(self, x: Tensor) -> Tensor:
        squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(ops.maximum(squares, 1e-24))


@keras.saving.register_keras_serializable("keras_vit")
class Dropout(keras.layers.Dropout):
    """Keras' Dropout, which takes its seeds from `runtime.random_scope` inside of it."""

    def call(self, inputs: Tensor, training: bool | None = False) -> Tensor:
        if not training or not self.rate:
            return inputs
        seed = runtime.seed_generator(self.seed_generator)
        return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=seed)


@keras.saving.register_keras_serializable("keras_vit")
class StochasticDepth(BaseLayer):
    """Drop a residual branch with probability `rate` in training (arXiv 1603.09382), or scale it by 1 / (1 - rate)."""

    def __init__(self, rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator() if rate else None

    def call(self, x: Tensor, training: bool | None = None) -> Tensor:
        if not training or self.seed_generator is None:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        seed = runtime.seed_generator(self.seed_generator)
        return keras.random.dropout(ops.ones(shape, x.dtype), self.rate, seed=seed) * x
