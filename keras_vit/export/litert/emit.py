"""Write the LiteRT graph of a VisionTransformer directly from its weights."""

from typing import Any

import numpy as np

from keras_vit.export.litert import images
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.encoder import Encoder
from keras_vit.export.litert.head import Head
from keras_vit.export.litert.layers import Layers
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options


def build_file(model: Any, options: Options) -> Builder:
    """Build the file of a VisionTransformer, of any back end and dtype policy; the file computes in float32.

    `options` are checked before. The signature is "image" -> "logits", "probabilities" or (without a head) "features",
    and "attention" if asked for.
    """
    builder = Builder(description=f"{model.name}, a Vision Transformer by keras_vit")
    scales = np.ones(model.config.hidden_size) if options.scales is None else np.asarray(options.scales, np.float64)
    layers = Layers(Operators(builder, options.storage), scales, options.smoothing, options.shifts)
    image = images.add_image_input(layers.ops, model.config, options)
    tokens, attention = Encoder(layers, model, options.patches).encode(image)
    head = Head(layers, model)
    second_output = {"attention": head.class_attention(attention)} if options.attention and attention else {}
    if not model.config.num_classes:
        outputs = {"features": head.features(tokens)}
    elif options.output == "logits":
        outputs = {"logits": head.logits(tokens)}
    else:
        outputs = {"probabilities": layers.ops.softmax(head.logits(tokens), "probabilities")}
    if unknown := sorted({*options.smoothing, *options.shifts} - set(layers.norm_names)):
        raise ValueError(f"smoothing names norms of the model: {layers.norm_names}. Received: {unknown}")
    builder.signature({"image": image.image}, outputs | second_output)
    return builder
