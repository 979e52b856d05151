"""A Keras model that returns a map for every image: a Vision Transformer and a head on the tokens of its blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import one_of
from keras_vit.dense.config import MapConfig, dpt_widths, four_blocks, last_blocks
from keras_vit.dense.framing import frame, run_windows, segment_image, to_image
from keras_vit.dense.heads import MapHead
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.dense.segments import SegmentMap, Segments, check_limits, class_scores, segment_task
from keras_vit.model import preprocess
from keras_vit.model.classify import check_outputs, single_images
from keras_vit.model.config import ViTConfig
from keras_vit.model.labels import check_labels
from keras_vit.model.layers.base import refuse_quantize
from keras_vit.model.maps import PatchMap as PatchMap
from keras_vit.model.maps import ResizeBilinear as ResizeBilinear
from keras_vit.model.preprocess import to_arrays
from keras_vit.model.vision_transformer import VisionTransformer

HEADS = ("linear", "multiscale", "dpt")


@keras.saving.register_keras_serializable("keras_vit")
class DenseModel(keras.Model):
    """A Vision Transformer with a head that returns a map: a functional Keras model.

    Args:
        backbone: the Vision Transformer. The model gets a copy of its weights, or its layers themselves if it has no
            head, as `backbone` of another DenseModel.
        head: config of the head.
        name: name of the model.

    Input: float32 (batch, height, width, channels), as `preprocess` returns them.
    Output: float32 logits (batch, rows, columns, classes) or depth (batch, rows, columns), at the head's own size.

    Attributes:
        backbone: the VisionTransformer, without its head; it shares its layers with this model.
        config: the ViTConfig of the backbone, with image size and preprocessing.
        head: the MapConfig of the head.

    Example:
        >>> model = keras_vit.dense.segmenter(keras_vit.zoo.load("digits"), 3, labels=["sky", "sea", "land"])
        >>> images = model.preprocess(np.zeros((2, 40, 60, 3), "uint8"))
        >>> tuple(model(images).shape), model.predict_maps(np.zeros((40, 60, 3), "uint8"))[0].shape
        ((2, 8, 8, 3), (40, 60))
        >>> model.resized((32, 48)).output_shape
        (None, 8, 12, 3)
        >>> model.with_config(model.config, dtype="mixed_bfloat16").head.labels
        ('sky', 'sea', 'land')
    """

    def __init__(self, backbone: VisionTransformer, head: MapConfig, *, name: str = "dense") -> None:
        if backbone.config != _plain_config(backbone):
            backbone = backbone.with_config(_plain_config(backbone))
        super().__init__(inputs=backbone.inputs[0], outputs=MapHead(backbone, head).output, name=name)
        self.config = backbone.config
        self.head = head
        # In a function, because Keras would track and save a model that is an attribute.
        self._get_backbone = lambda: backbone

    def _assert_input_compatibility(self, inputs: Any) -> None:
        """Ask for prepared images before Keras asks for their shape: pixels are seldom of the model's size."""
        preprocess.check_floats(inputs)
        super()._assert_input_compatibility(inputs)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        """Compute the map of prepared images."""
        preprocess.check_prepared(inputs, self.config)
        return super().call(inputs, training=training, mask=mask, **kwargs)

    quantize = refuse_quantize

    @property
    def backbone(self) -> VisionTransformer:
        """The VisionTransformer, without its head; it shares its layers with this model."""
        return self._get_backbone()

    @property
    def task(self) -> Segmentation | Depth | Segments:
        """Task of the output: how the model is trained, evaluated, exported and compared."""
        if self.head.output == "segments":
            return Segments(num_classes=self.head.num_classes, labels=self.head.labels)
        if self.head.output == "depth":
            return Depth(max_depth=self.head.max_depth)
        return Segmentation(num_classes=self.head.num_classes, labels=self.head.labels, image_size=self.config.size)

    @property
    def head_layers(self) -> list[str]:
        """Names of the layers that are not the backbone's."""
        return [layer.name for layer in self.layers if layer not in self.backbone.layers]

    def preprocess(self, images: Any) -> np.ndarray:
        """Prepare images at the model's size, whole: the aspect ratio is not kept.

        Args:
            images: as for `VisionTransformer.preprocess`.

        Returns:
            float32 (batch, height, width, channels).

        Raises:
            ValueError: as `VisionTransformer.preprocess`.
        """
        return self.backbone.preprocess(images)

    def predict_maps(self, images: Any) -> list[np.ndarray]:
        """Compute a map for every image, at the image's own size, as the official code does.

        Args:
            images: as for `VisionTransformer.classify`: paths, folders, PIL images, arrays of 0..255, or a list.

        Returns:
            For each image an array (height, width): numbers of the classes, uint8 (int32 for more than 256 classes), or
            float32 depth.

        Raises:
            ValueError: an image cannot be read or is too large, there is none, or the model computes NaN or infinity.
            FileNotFoundError: there is no file at a path, or no image in a folder.
        """
        models: dict[tuple[int, ...], DenseModel] = {self.config.size: self}
        maps = []
        for image in single_images(images):
            [pixels] = to_arrays(image, self.config.num_channels, self.config.preprocessing)
            if self.head.output == "segments":
                scores = class_scores(*run_windows(pixels[0], self.head, self.config, self.predict_on_batch))
                maps.append(to_image(scores, self.head, pixels.shape[1:3]))
                continue
            prepared = frame(pixels[0], self.head, self.config)
            size = prepared.shape[1:3]
            if size not in models:
                models = {self.config.size: self, size: self.resized(size)}  # one more copy of the weights at a time
            output = models[size].predict_on_batch(prepared)
            check_outputs(output)
            maps.append(to_image(output[0], self.head, pixels.shape[1:3]))
        if not maps:
            raise ValueError("predict_maps needs at least one image. Received: an empty list")
        return maps

    def predict_segments(
        self, images: Any, *, task: str | None = None, threshold: float = 0.8, stuff_classes: Collection[int] = ()
    ) -> list[SegmentMap]:
        """Find the segments of every image with an EoMT, at the image's own size, as the official code does.

        Args:
            images: as for `predict_maps`.
            task: "panoptic", every pixel belongs to one segment at most; "instance", later masks lie on earlier ones;
                or "semantic", one segment for each class. None is what the model's images are prepared for: "semantic"
                for windows, else "panoptic".
            threshold: least score of a segment, 0 to 1; not for "semantic".
            stuff_classes: numbers of classes of which an image has one "panoptic" segment, such as sky.

        Returns:
            For each image a `SegmentMap`.

        Raises:
            ValueError: as `predict_maps`, an argument is wrong, or the model has no queries.
            FileNotFoundError: as `predict_maps`.

        Example:
            >>> head = {"kind": "queries", "output": "segments", "framing": "fit", "num_queries": 3, "query_blocks": 1}
            >>> head = keras_vit.dense.MapConfig(**head, blocks=(3,), num_classes=5)
            >>> model = keras_vit.dense.DenseModel(keras_vit.zoo.load("digits"), head)
            >>> model.predict_segments(np.zeros((40, 60, 3), "uint8"), threshold=0.9)[0].ids.shape
            (40, 60)
        """
        if self.head.output != "segments":
            raise ValueError(f"predict_segments needs a model with queries, an EoMT. Received: {self.task.NAME}")
        segment_task(task, self.head.framing)  # before any image is read
        check_limits(threshold, stuff_classes, self.head.num_classes)
        found = []
        for image in single_images(images):
            [pixels] = to_arrays(image, self.config.num_channels, self.config.preprocessing)
            options: Any = {"task": task, "threshold": threshold, "stuff_classes": stuff_classes}
            names = self.task.class_names()
            found.append(
                segment_image(pixels[0], self.head, self.config, self.predict_on_batch, names=names, **options)
            )
        if not found:
            raise ValueError("predict_segments needs at least one image. Received: an empty list")
        return found

    def resized(self, image_size: int | tuple[int, int]) -> DenseModel:
        """Copy the model for another image size, as `VisionTransformer.resized` does.

        Args:
            image_size: int or (height, width) in pixels.

        Raises:
            ValueError: the size is wrong.
        """
        return self.with_config(self.config.replace(image_size=image_size))

    def with_config(self, config: ViTConfig, *, dtype: Any = None, labels: Any = None) -> DenseModel:
        """Copy the model with another config of the backbone, as `VisionTransformer.with_config` does.

        Args:
            config: config of the new backbone; fields on which the shapes of weights depend must agree.
            dtype: a Keras dtype policy or its name; None means this model's.
            labels: names of the classes; None means this model's.

        Raises:
            ValueError: the weights do not fit the config.
        """
        head = self.head if labels is None else self.head.replace(labels=labels)
        other = DenseModel(self.backbone.with_config(config, dtype=dtype), head, name=self.name)
        for name in set(self.head_layers).intersection(other.head_layers):  # only odd grids need some of the resizes
            other.get_layer(name).set_weights(self.get_layer(name).get_weights())
            other.get_layer(name).trainable = self.get_layer(name).trainable
        return other

    def get_config(self) -> dict[str, Any]:
        """Arguments of `from_config`."""
        frozen = [name for name in self.head_layers if not self.get_layer(name).trainable]
        return {
            "backbone": self.backbone.get_config(),
            "head": self.head.to_dict(),
            "name": self.name,
            "frozen": frozen,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> DenseModel:
        """Build a model with initial weights from the result of `get_config`."""
        del custom_objects  # every layer is registered
        backbone = VisionTransformer.from_config(config["backbone"])
        model = cls(backbone, MapConfig(**config["head"]), name=config["name"])
        for name in config["frozen"]:
            model.get_layer(name).trainable = False
        return model

    def save_own_variables(self, store: Any) -> None:
        """Save the weights of the backbone that the head does not read, such as those of its final norm."""
        for number, variable in enumerate(self._unread_variables()):
            store[str(number)] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Load the weights that `save_own_variables` saved."""
        for number, variable in enumerate(self._unread_variables()):
            variable.assign(store[str(number)])

    def _unread_variables(self) -> list[Any]:
        own = {id(variable) for variable in self.variables}
        return [variable for variable in self.backbone.variables if id(variable) not in own]


def segmenter(backbone: VisionTransformer, num_classes: int, *, head: str = "linear", labels: Any = None) -> DenseModel:
    """Build a model that gives each cell of an image a class: a backbone and a new head.

    Args:
        backbone: a VisionTransformer; its weights are copied.
        num_classes: number of classes.
        head: "linear" (batch normalization and a dense layer on the last block, as DINOv2's), "multiscale" (the same on
            the last four blocks), or "dpt" (arXiv 2103.13413).
        labels: name of a list in zoo/labels, or the names of the classes.

    Returns:
        The model: prepared images -> float32 logits (batch, rows, columns, num_classes).

    Raises:
        ValueError: an argument is wrong, or the backbone has too few blocks.

    Example:
        >>> model = keras_vit.dense.segmenter(keras_vit.zoo.load("digits"), 3)
        >>> model.output_shape
        (None, 8, 8, 3)
    """
    names = labels if labels is None else check_labels(labels)
    return _new_model(backbone, head, num_classes=num_classes, labels=names, batch_norm=True)


def depth(backbone: VisionTransformer, *, head: str = "dpt", max_depth: float | None = None) -> DenseModel:
    """Build a model that estimates the depth of each cell of an image: a backbone and a new head.

    Args:
        backbone: a VisionTransformer; its weights are copied.
        head: "dpt", as Depth Anything's (arXiv 2406.09414), or "linear" or "multiscale", expectations over 256 bins of
            depth from the last block or from four, as DINOv2's; these need max_depth.
        max_depth: greatest depth, for example in metres; None for relative depth, which is larger the nearer.

    Returns:
        The model: prepared images -> float32 depth (batch, rows, columns).

    Raises:
        ValueError: an argument is wrong, or the backbone has too few blocks.

    Example:
        >>> model = keras_vit.dense.depth(keras_vit.zoo.load("digits"), max_depth=20)
        >>> model.output_shape
        (None, 32, 32)
    """
    return _new_model(backbone, head, output="depth", max_depth=max_depth)


def _new_model(backbone: VisionTransformer, head: str, **fields: Any) -> DenseModel:
    one_of("head", head, HEADS)
    config = _plain_config(backbone)
    last = config.num_layers - 1
    is_depth = fields.get("output") == "depth"
    if head == "dpt":
        depth = {"activation": "relu" if fields.get("max_depth") is None else "sigmoid"}
        classes = {"residual_bias": False}
        fields |= dpt_widths(config.hidden_size) | (depth if is_depth else classes)
        fields |= {"kind": "dpt", "blocks": four_blocks(config.num_layers)}
    elif is_depth:
        blocks = (last,) if head == "linear" else four_blocks(config.num_layers)
        readout = "concat" if config.class_token and config.num_class_tokens == 1 else "ignore"
        fields |= {"blocks": blocks, "min_depth": 0.001, "norm": False, "upsample": 4, "readout": readout}
    else:
        fields["blocks"] = (last,) if head == "linear" else last_blocks(config.num_layers)
    return DenseModel(backbone.with_config(config), MapConfig(**fields))


def _plain_config(backbone: VisionTransformer) -> ViTConfig:
    """Config of a VisionTransformer without its head, whose last block computes all tokens."""
    if not isinstance(backbone, VisionTransformer):
        raise ValueError(f"backbone must be a VisionTransformer. Received: {type(backbone).__name__}")
    config = backbone.config
    if config.distilled or not config.num_layers:
        kind = "a model with a distillation token" if config.distilled else "a ResNet without blocks"
        raise ValueError(f"backbone must be a Vision Transformer without a distillation token. Received: {kind}")
    changes = {"classifier": "gap", "num_classes": 0, "representation_size": None, "normalize_features": False}
    whole = replace(config.preprocessing, resize="squash", crop_fraction=1.0)  # a map is of the whole image
    return config.replace(**changes, preprocessing=whole)
