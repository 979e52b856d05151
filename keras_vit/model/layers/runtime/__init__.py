"""Make the layers fast: compiled pieces, written-out gradients, recomputation, seeds, tokens that are not read.

The layers call these functions and read as the paper. Whoever runs a model chooses settings for all of its layers:

    with runtime.random_scope(seed, remat=True), runtime.fuse_with(compiler):
        logits = model(images, training=True)

Without settings the layers compute what Keras' own layers do.
"""

from keras_vit.model.layers.runtime.fused import (
    add_bias_and_apply,
    attend,
    attention_weights,
    layer_norm,
    normalize,
    product_then,
)
from keras_vit.model.layers.runtime.settings import (
    Compiler,
    Observer,
    as_one_block,
    final_tokens_only,
    fuse_with,
    observe,
    observe_norms,
    random_scope,
    seed_generator,
    settings,
    tokens_to_compute,
    uninitialized,
)

__all__ = [
    "Compiler",
    "Observer",
    "add_bias_and_apply",
    "as_one_block",
    "attend",
    "attention_weights",
    "final_tokens_only",
    "fuse_with",
    "layer_norm",
    "normalize",
    "observe",
    "observe_norms",
    "product_then",
    "random_scope",
    "seed_generator",
    "settings",
    "tokens_to_compute",
    "uninitialized",
]
