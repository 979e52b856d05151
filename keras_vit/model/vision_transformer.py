"""The Vision Transformer (paper, section 3), a functional Keras model built from one config."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit.model import labels as label_lists
from keras_vit.model import layers as vit
from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.relative import RelativePosition
from keras_vit.model.network import Graph

HEADS = ("head", "head_distillation")  # layers that give logits


class Prediction(NamedTuple):
    """One class of an image's ranking."""

    label_id: str
    label: str
    probability: float


@keras.saving.register_keras_serializable("keras_vit")
class VisionTransformer(keras.Model):
    """A pure Vision Transformer or a ResNet hybrid.

    Args:
        config: what it is made of.
        dtype: a Keras dtype policy or its name ("mixed_bfloat16"); None is the global one.
        name: of the model.

    Input: images (batch, height, width, channels), prepared by `preprocess`; float32, or float64 under that policy.
    Output: logits (batch, num_classes), (batch, tokens, num_classes) for the unpooled classifiers, or without a head
    the feature (batch, hidden_size or representation_size); float32 whatever the policy, float64 under float64.
    """

    def __init__(self, config: ViTConfig, *, dtype: Any = None, name: str = "vit") -> None:
        policy = keras.dtype_policies.get(dtype if dtype is not None else keras.config.dtype_policy())
        _warn_of_a_rest(config)
        graph = Graph(config, policy)
        super().__init__(inputs=graph.images, outputs=graph.output, name=name)
        self.config = config
        self._policy = policy
        self._intermediates = graph.intermediates
        # A function, not a dict: Keras saves the models that it finds in a model's containers.
        self._feature_model = functools.cache(self._build_feature_model)
        self._block_input_model = functools.cache(lambda: keras.Model(graph.images, graph.block_inputs))

    def features(self, images: Any, layers: Iterable[str] | None = None) -> dict[str, Any]:
        """What the model computes on its way.

        Args:
            images: prepared images, as the model itself takes.
            layers: names out of `feature_names`; None means the tokens after every block, and "pre_logits".

        Returns:
            name -> tensor: tokens (batch, tokens, hidden_size), the stem's maps (batch, height, width, channels),
            "pre_logits" (batch, features) as the head sees it.

        Raises:
            ValueError: for a name that the model does not have.
        """
        if isinstance(layers, str):
            layers = [layers]
        if layers is None:
            layers = [name for name in self.feature_names if name.startswith("block_") or name == "pre_logits"]
        names = tuple(layers)
        unknown = [name for name in names if name not in self._intermediates]
        if unknown or not names:
            raise ValueError(f"layers are some of {self.feature_names}. Received: {unknown or list(names)}")
        return self._feature_model(names)(images, training=False)

    def _build_feature_model(self, names: tuple[str, ...]) -> keras.Model:
        return keras.Model(self.inputs[0], {name: self._intermediates[name] for name in names})

    @property
    def feature_names(self) -> list[str]:
        """The names `features` knows, in the order they are computed."""
        return list(self._intermediates)

    def attention_maps(self, images: Any) -> list[Any]:
        """The attention weights of every block: a list of (batch, heads, tokens, tokens), every row summing to 1
        (in bfloat16 to 2e-3).

        Args:
            images: prepared images, as the model itself takes.
        """
        inputs = self._block_input_model()(images, training=False)
        names = (f"block_{i}" for i in range(self.config.num_layers))
        return [self.get_layer(name).attention_weights(*inputs[name]) for name in names]

    def preprocess(self, images: Any) -> np.ndarray:
        """Prepares images as the weights expect: resized, scaled, in a batch. See `keras_vit.preprocess.prepare`.

        Args:
            images: one or several of: uint8 or 0..255 float arrays (height, width, channels), PIL images, paths.

        Returns:
            float32 (batch, height, width, channels).
        """
        return preprocess.prepare(
            images,
            image_size=self.config.size,
            num_channels=self.config.num_channels,
            preprocessing=self.config.preprocessing,
        )

    def decode_predictions(self, logits: Any, top: int = 5) -> list[list[Prediction]]:
        """The most likely classes of each image, best first.

        Args:
            logits: (batch, num_classes), as the model returns them.
            top: how many.

        Returns:
            for each image [(label_id, label, probability)]; label_id is the WordNet id where the list has one,
            else the class number.
        """
        logits = keras.ops.convert_to_numpy(logits)
        if logits.ndim != 2 or logits.shape[1] != self.config.num_classes or not self.config.num_classes:
            raise ValueError(
                f"logits are (batch, num_classes={self.config.num_classes}). Received: shape {logits.shape}"
            )
        if top < 1:
            raise ValueError(f"top is the number of classes to name, from 1. Received: {top}")
        labels = label_lists.names(self.config.labels, self.config.num_classes)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = shifted / shifted.sum(axis=1, keepdims=True)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
        return [
            [Prediction(*labels[int(index)], float(row[index])) for index in order]
            for row, order in zip(probabilities, best, strict=True)
        ]

    def classify(self, images: Any, top: int = 5) -> list[list[Prediction]]:
        """From images to class names: `preprocess`, one compiled call, `decode_predictions`.

        Args:
            images: as for `preprocess`.
            top: how many classes an image.
        """
        # predict_on_batch keeps one compiled function; predict() adds 25-40 ms of data adapter to every call.
        return self.decode_predictions(self.predict_on_batch(self.preprocess(images)), top)

    def resized(self, image_size: int | tuple[int, int], method: str | None = None) -> VisionTransformer:
        """The same weights at another resolution: a new model whose position embeddings are interpolated once.

        Args:
            image_size: int or (height, width), pixels.
            method: of `position.resize`; None is the model's own.
        """
        changes = {"image_size": image_size} | ({"position_method": method} if method else {})
        return self.rebuilt(self.config.replace(**changes))

    def rebuilt(self, config: ViTConfig, *, dtype: Any = None, fresh: Sequence[str] = ()) -> VisionTransformer:
        """The same weights in a new model of another config: another resolution, head, dropout or dtype policy.

        A head of another number of classes, or behind another pre_logits layer, is new and zero.

        Args:
            config: of the new model; position embeddings are interpolated, all other shapes must agree.
            dtype: a Keras dtype policy or its name; None is this model's.
            fresh: names of further layers that start anew; those the new config has not may be named too.
        """
        if config.representation_size != self.config.representation_size:
            fresh = ["pre_logits", *HEADS, *fresh]
        elif config.num_classes != self.config.num_classes:
            fresh = [*HEADS, *fresh]
        with contextlib.nullcontext() if fresh else vit.uninitialized():
            other = VisionTransformer(config, dtype=dtype or self._policy, name=self.name)
        other.copy_weights_from(self, skip=fresh)
        other._freeze(entry for entry in self._frozen() if entry[0] not in fresh)
        return other

    def copy_weights_from(self, source: VisionTransformer, *, skip: Sequence[str] = ()) -> None:
        """Takes over the weights of a model of the same architecture, interpolating its position embeddings.

        Args:
            source: where they come from.
            skip: names of layers that keep their own weights.
        """
        for layer in self.layers:
            if layer.name in skip or not layer.weights:
                continue
            origin = source.get_layer(layer.name)
            if isinstance(layer, vit.PositionEmbedding | RelativePosition):
                store: dict[str, Any] = {}
                origin.save_own_variables(store)
                layer.load_own_variables(store)
            else:
                for variable, value in zip(layer.weights, origin.weights, strict=True):
                    variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs: the config, the dtype policy, the name, and which layers are frozen."""
        policy = keras.dtype_policies.serialize(self._policy)
        return {"config": self.config.to_dict(), "dtype": policy, "name": self.name, "frozen": self._frozen()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> VisionTransformer:
        """A new model, its weights initialised, from what `get_config` gave."""
        del custom_objects  # every layer is registered
        policy = keras.dtype_policies.deserialize(config["dtype"])
        model = cls(ViTConfig(**config["config"]), dtype=policy, name=config["name"])
        model._freeze(config["frozen"])
        return model

    def _frozen(self) -> list[list[Any]]:
        """The layers that are not trained, those inside of others too, as [outer layer, place among its parts]."""
        return [
            [layer.name, place]
            for layer in self.layers
            for place, part in enumerate(layer._flatten_layers())
            if not part.trainable
        ]

    def _freeze(self, frozen: Iterable[Sequence[Any]]) -> None:
        for name, place in frozen:
            list(self.get_layer(name)._flatten_layers())[place].trainable = False


def _warn_of_a_rest(config: ViTConfig) -> None:
    height, width = config.size
    used = tuple(cells * step for cells, step in zip(config.grid, config.stride, strict=True))
    # More than the image: a stem pads it, and nothing is lost.
    if used[0] < height or used[1] < width:
        warnings.warn(
            f"keras_vit: images of {height}x{width} pixels are no multiple of the "
            f"{config.stride[0]}x{config.stride[1]} patch; "
            f"the model sees the upper left {used[0]}x{used[1]}, as in the official code.",
            stacklevel=3,
        )
