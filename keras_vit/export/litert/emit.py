"""Write the LiteRT graph of a VisionTransformer, directly from its weights: input, encoder, head."""

from __future__ import annotations

from typing import Any

from keras_vit.export.litert import images
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.encoder import Encoder
from keras_vit.export.litert.head import Head
from keras_vit.export.litert.layers import Layers
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options


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
    options.check(model.config)
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
