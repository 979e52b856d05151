"""Vision Transformers for TensorFlow and Keras 3: load the official models exactly, train, export.

Public names are imported on first use, so `import keras_vit` is fast and starts no TensorFlow.

Example:
    >>> model = keras_vit.zoo.load("digits")
    >>> model.classify(keras_vit.digits.load().test_images[0], top=1)[0][0].label
    'seven'
"""

from typing import TYPE_CHECKING

from keras_vit._util.public_names import PUBLIC as __all__
from keras_vit._util.public_names import VERSION as __version__
from keras_vit._util.public_names import get_name as __getattr__
from keras_vit._util.public_names import list_names as __dir__

if TYPE_CHECKING:
    from keras_vit import batch as batch
    from keras_vit import converters as converters
    from keras_vit import dense as dense
    from keras_vit import digits as digits
    from keras_vit import errors as errors
    from keras_vit import export as export
    from keras_vit import position as position
    from keras_vit import text as text
    from keras_vit import train as train
    from keras_vit import visualize as visualize
    from keras_vit import zoo as zoo
    from keras_vit.model import Preprocessing as Preprocessing
    from keras_vit.model import ResNetConfig as ResNetConfig
    from keras_vit.model import VisionTransformer as VisionTransformer
    from keras_vit.model import ViTConfig as ViTConfig
