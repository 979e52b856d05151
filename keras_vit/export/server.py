"""Build a SavedModel's functions: the model's graph, its signatures, and the decoding of image files in the graph.

The graph has the form that TensorFlow's optimizer for CPUs joins to few operators.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from keras_vit.model.images import HEADER_SPEC, decode_pixels, read_header, requirements, to_grey
from keras_vit.model.layers import runtime
from keras_vit.model.layers.base import activation_function
from keras_vit.model.pillow import CHANNELS
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]  # tensors by name

PARALLEL_IMAGES = 4  # decoded at the same time, so that memory is bounded
# On CPUs, TensorFlow's optimizer recognizes its own GELUs, and joins them with the matrix product before them.
GELUS = {
    activation_function("gelu_tanh"): functools.partial(tf.nn.gelu, approximate=True),
    activation_function("gelu_erf"): tf.nn.gelu,
}
NORM_DTYPES = (tf.float32, tf.bfloat16)  # that TensorFlow's batch norm takes


def build(model: VisionTransformer, *, labels: Sequence[str] | None, top: int) -> tuple[Any, dict[str, Any]]:
    """Build a tf.Module with the model's weights, each once, and its functions by the names of their signatures.

    The weights are TensorFlow variables: inside Keras variables the C++ loader does not find them, and `model.export`
    stores each twice (keras issue 23553).
    """
    config = model.config
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")
    floats = tf.TensorSpec((None, *config.size, config.num_channels), tf.float32, name="images")
    pixels = tf.TensorSpec((None, None, None, config.num_channels), tf.uint8, name="images")
    prepare = preprocess.preprocessing_function(
        image_size=config.size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    decoded = functools.partial(decode, config=config)
    own_outputs = model.output if isinstance(model.output, dict) else model.task.outputs[:1]
    answer = functools.partial(model.task.served_outputs, names=labels, top=top)
    # Once in the file, called by all.
    run = tf.function(model_function(model), input_signature=[floats], autograph=False)

    def tolerant(image_bytes: Any) -> Outputs:
        images, valid = decode_tolerant(image_bytes, config)
        outputs = {name: _mask(value, valid) for name, value in answer(run(images)).items()}
        return {**outputs, "valid": valid}

    def with_output(computed: Outputs) -> Outputs:
        return {**answer(computed), **{name: computed[name] for name in own_outputs}}

    # The names of arguments are those of the inputs.
    specified: dict[str, tuple[Callable[..., Outputs], Any]] = {
        "serving_default": (lambda image_bytes: answer(run(decoded(image_bytes))), files),
        "tolerant": (tolerant, files),
        "features": (lambda image_bytes: {"features": run(decoded(image_bytes))["features"]}, files),
        "float_images": (lambda images: with_output(run(images)), floats),
        "uint8_images": (lambda images: with_output(run(prepare(images))), pixels),
    }
    if not isinstance(model, VisionTransformer):  # a DenseModel
        del specified["features"]
    if config.num_channels not in CHANNELS:
        specified = {name: (function, spec) for name, (function, spec) in specified.items() if spec is not files}
        specified["serving_default"] = specified["float_images"]

    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.functions = {
        name: tf.function(function, input_signature=[spec], autograph=function is tolerant)  # which has loops
        for name, (function, spec) in specified.items()
    }
    return module, dict(module.functions)


def _mask(value: Any, valid: Any) -> Any:
    """Replace the rows of bad images by zeros or empty strings."""
    rows = tf.reshape(valid, (-1, *[1] * (value.shape.rank - 1)))
    return tf.where(rows, value, tf.constant("" if value.dtype == tf.string else 0, value.dtype))


def model_function(model: keras.Model) -> Callable[[Any], Outputs]:
    """Wrap the model as a function: prepared images -> float32 "features", the head's input, and the head's output.

    For classifiers that read the class token, the last block computes that token only. A DenseModel has no features.
    """
    if not isinstance(model, VisionTransformer):
        return functools.partial(_map_outputs, model)
    names = ["pre_logits", *(name for name in model.task.outputs[:1] if name != "features")]

    def run(images: Any) -> Outputs:
        with runtime.final_tokens_only(), runtime.fuse_with(_for_graphs):
            outputs = model.features(images, names)
        return {"features": keras.ops.cast(outputs.pop("pre_logits"), "float32"), **outputs}

    return run


def _map_outputs(model: keras.Model, images: Any) -> Outputs:
    with runtime.fuse_with(_for_graphs):
        output = model(images, training=False)
        return output if isinstance(output, dict) else {model.task.outputs[0]: output}


def _for_graphs(
    function: Callable[..., Any], *, gradient: Any = None, back: Any = None, keeps_first: bool = True, **settings: Any
) -> Callable[..., Any]:
    """Adapt a function of the layers, so that TensorFlow's optimizer joins it to one operator on CPUs."""
    del gradient, back, keeps_first  # no graph that is served has a gradient
    joined: Any = {runtime.add_bias_and_apply: _add_bias_and_apply, runtime.normalize: _normalize}
    return functools.partial(joined.get(function, function), **settings)


def _add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any
) -> Any:
    """Apply `after` to a product (rows, columns) and its bias. Only a GELU follows its product directly.

    Any other bias is added after a reshape, which the optimizer does not join: with weights in variables, a joint
    product is slower in bfloat16.
    """
    is_gelu = after in GELUS
    tokens = shape[:1] if len(shape) > 1 else ()
    x = product if is_gelu else tf.reshape(product, (-1, *tokens, product.shape[-1]))
    x = tf.nn.bias_add(x, *bias) if bias else x
    return tf.reshape(GELUS[after](x), (-1, *shape)) if is_gelu else after(tf.reshape(x, (-1, *shape)), **settings)


def _normalize(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Apply a LayerNorm as a batch norm with the rows as channels: one operator, which computes in float32."""
    if x.dtype not in NORM_DTYPES:
        return runtime.normalize(x, gamma, beta, epsilon=epsilon)
    rows = tf.size(x) // x.shape[-1]
    y = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, [1, rows, x.shape[-1], 1]),
        scale=tf.fill([rows], 1.0),
        offset=tf.fill([rows], 0.0),
        mean=tf.constant([], tf.float32),
        variance=tf.constant([], tf.float32),
        epsilon=epsilon,
        data_format="NCHW",
    ).y
    gamma, beta = (tf.cast(keras.ops.convert_to_tensor(weight), x.dtype) for weight in (gamma, beta))
    return tf.reshape(y, tf.shape(x)) * gamma + beta


def decode(files: Any, config: ViTConfig) -> Any:
    """Decode and prepare JPEG and PNG files, strings (batch,): float32 (batch, height, width, channels).

    The pixels are those of `preprocess.decode`. If a file is damaged, too large, of another format, or CMYK without
    Adobe's mark, the call fails. All headers are checked before anything is decoded.
    """
    headers = tf.map_fn(read_header, files, fn_output_signature=HEADER_SPEC)
    checks = []
    for holds, message, values in requirements(headers):
        numbers = tf.where(~holds)[:, 0]
        values = [] if isinstance(values, str) else [tf.gather(values, numbers)]
        words = [message, *values, "- number of the file in the batch, counted from 0:", numbers]
        checks.append(_require(tf.reduce_all(holds), *words))
    with tf.control_dependencies(checks):
        files = tf.identity(files)
    return tf.map_fn(
        lambda row: _decode_and_prepare(row[0], row[1], config),
        (files, headers.orientation),
        fn_output_signature=_spec(config),
        parallel_iterations=PARALLEL_IMAGES,
    )


def decode_tolerant(files: Any, config: ViTConfig) -> tuple[Any, Any]:
    """Decode and prepare files like `decode`, with zeros for a bad file; return also bool (batch,): True if good."""
    count = tf.size(files, tf.int64)

    def decode_one(number: Any) -> tuple[Any, Any]:
        header = read_header(files[number])
        checks = [_require(holds, message) for holds, message, _ in requirements(header)]
        with tf.control_dependencies(checks):
            file = tf.identity(files[number])
        return number, _decode_and_prepare(file, header.orientation, config)

    stream = tf.data.Dataset.range(count).map(decode_one, num_parallel_calls=PARALLEL_IMAGES)
    spec = _spec(config)
    images = tf.TensorArray(tf.float32, size=tf.size(files), element_shape=spec.shape)
    for number in tf.range(tf.size(files)):
        images = images.write(number, tf.zeros(spec.shape))
    valid = tf.zeros((count,), tf.bool)
    for number, image in stream.ignore_errors().with_options(_stream_options()):
        images = images.write(tf.cast(number, tf.int32), image)
        valid = tf.tensor_scatter_nd_update(valid, [[number]], [True])
    return images.stack(), valid


def _stream_options() -> Any:
    """Options without tuning, which TensorFlow would start again at each call."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.max_intra_op_parallelism = 1
    return options


def _spec(config: ViTConfig) -> Any:
    return tf.TensorSpec((*config.size, config.num_channels), tf.float32)


def _decode_and_prepare(file: Any, orientation: Any, config: ViTConfig) -> Any:
    """Decode and prepare one file with a good header."""
    prepare = preprocess.preprocessing_function(
        image_size=config.size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    pixels = decode_pixels(file, orientation, config.preprocessing)
    return prepare(to_grey(pixels) if config.num_channels == 1 else pixels)


def _require(condition: Any, *words: Any) -> Any:
    """Fail with this message if the condition is false, without the branch of tf.debugging."""
    return tf.raw_ops.Assert(condition=condition, data=[tf.convert_to_tensor(word) for word in words])
