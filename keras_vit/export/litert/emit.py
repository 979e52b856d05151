"""Write the LiteRT graph of a VisionTransformer, directly from its weights: input, encoder, head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert import images
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.encoder import Encoder
from keras_vit.export.litert.head import Head
from keras_vit.export.litert.layers import Layers
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.storage import FLOAT32, Storage

OUTPUTS = ("logits", "probabilities")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a file shall be like.

    Args:
        batch: images a call; None for any number, which the caller sets with `resize_tensor_input`.
        storage: how kernels are kept.
        dtype: of the input: "float32" for prepared images, "uint8" for pixels.
        source_size: (height, width) of pixels that the file resizes.
        resize: "exact" or "builtin", see `images.input`.
        output: "logits" or "probabilities".
        attention: whether there is a second output "attention" (batch, heads, patches): how the class token of the last
            block attends to the patches.
        smoothing: factors (hidden_size,) by the name of a norm, such as "block_3/norm1": the file computes the norm's
            result times these, and the kernel behind it is divided by them. It moves outliers from what is quantized
            while the file runs into the kernel (SmoothQuant, arXiv 2211.10438).
    """

    batch: int | None = 1
    storage: Storage = FLOAT32
    dtype: str = "float32"
    source_size: tuple[int, int] | None = None
    resize: str = "exact"
    output: str = "logits"
    attention: bool = False
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)


def emit(model: Any, options: Options | None = None) -> Builder:
    """Build the file of a model, ready for `Builder.write`. It holds the weights that the model has now.

    Args:
        model: a VisionTransformer, on any back end, of any dtype policy. The file computes in float32.
        options: None means one prepared image, float32 kernels, logits.

    Returns:
        A file with the signature "image" -> "logits" or "probabilities" (without a head: "features"), shaped as the
        model's output, and "attention" where `options.attention`.

    Raises:
        ValueError: options are wrong or need something that the model does not have; one error names all of them.
        ImportError: ai-edge-litert is not installed.
    """
    options = options or Options()
    if errors := list(_option_errors(model.config, options)):
        raise ValueError("emit: " + "; ".join(errors))
    builder = Builder(description=f"{model.name}, a Vision Transformer by keras_vit")
    layers = Layers(Operators(builder, options.storage), options.smoothing)
    image = images.input(layers.ops, model.config, options)
    tokens, attention = Encoder(layers, model).encode(image)
    head = Head(layers, model)
    second_output = {"attention": head.class_attention(attention)} if options.attention else {}
    if not model.config.num_classes:
        outputs = {"features": head.features(tokens)}
    elif options.output == "logits":
        outputs = {"logits": head.logits(tokens)}
    else:
        outputs = {"probabilities": layers.ops.softmax(head.logits(tokens), "probabilities")}
    if unknown := sorted(set(options.smoothing) - set(layers.norm_names)):
        raise ValueError(f"smoothing names norms of the model: {layers.norm_names}. Received: {unknown}")
    builder.signature({"image": image.image}, outputs | second_output)
    return builder


def _option_errors(config: Any, options: Options) -> Iterator[str]:
    if options.output not in OUTPUTS:
        yield f"output is one of {list(OUTPUTS)}. Received: {options.output!r}"
    if options.output == "probabilities" and not config.num_classes:
        yield "output='probabilities' needs a head. Received: a model of num_classes=0"
    if options.batch is not None and options.batch < 1:
        yield f"batch is a whole number from 1, or None. Received: {options.batch!r}"
    if options.attention and not config.class_token:
        yield "attention=True is the attention of the class token. Received: a model without a class token"
    wrong = {
        name: np.shape(factors)
        for name, factors in options.smoothing.items()
        if np.shape(factors) != (config.hidden_size,) or not np.all(np.asarray(factors) > 0)
    }
    if wrong:
        yield f"smoothing has ({config.hidden_size},) factors above 0 for each norm. Received: {wrong}"
