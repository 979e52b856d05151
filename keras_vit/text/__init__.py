"""Text towers of CLIP and SigLIP, with their tokenizers.

Example:
    >>> config = keras_vit.text.TextConfig(vocab_size=100, hidden_size=32, num_layers=1, num_heads=2, mlp_dim=64)
    >>> encoder = keras_vit.text.TextEncoder(config)
    >>> tuple(encoder(np.zeros((2, 77), "int32")).shape)
    (2, 512)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
