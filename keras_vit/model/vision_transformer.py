"""Vision Transformer (paper, section 3): a functional Keras model built from one config."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import position
from keras_vit._util import html
from keras_vit._util.checks import given
from keras_vit.model import preprocess, task
from keras_vit.model.classify import BATCH, classify_each, embed_all
from keras_vit.model.config import ViTConfig, check_attention, check_patches, check_resizable
from keras_vit.model.layers import PatchEmbedding, runtime
from keras_vit.model.layers.base import refuse_quantize
from keras_vit.model.maps import Blocks, map_names, to_map
from keras_vit.model.task import Prediction
from keras_vit.model.vit import Network, adapt_channels, image_kernel

HEADS = ("head", "head_distillation")  # names of the layers that return logits


@keras.saving.register_keras_serializable("keras_vit")
class VisionTransformer(keras.Model):
    """Vision Transformer (arXiv 2010.11929), pure or after a ResNet: a functional Keras model built from one config.

    Args:
        config: the architecture.
        dtype: a Keras dtype policy or its name, such as "mixed_bfloat16"; None means the global policy.
        name: name of the model.

    Input: float32 (batch, height, width, channels), as `preprocess` returns them; float64 under the policy "float64".
    Output: logits, (batch, num_classes), or (batch, tokens, num_classes) for the unpooled classifiers. Without a head
    the feature, (batch, hidden_size or representation_size). The dtype is float32 under every policy but "float64".

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> photos = digits.load().test_images[:2]
        >>> model.classify(photos, top=1)[0][0].label
        'seven'
        >>> images = model.preprocess(photos)  # classify in three steps
        >>> images.shape, tuple(model(images).shape)
        ((2, 32, 32, 3), (2, 10))
        >>> model.decode_predictions(model(images), top=1)[0][0].label
        'seven'
        >>> model.embed(photos).shape
        (2, 64)
        >>> tuple(model.features(images)["block_3"].shape), tuple(model.attention_maps(images)[0].shape)
        ((2, 65, 64), (2, 4, 65, 65))
        >>> model.resized((32, 48)).config.grid, model.resized(patch_size=8).config.grid
        ((8, 12), (4, 4))
        >>> three_classes = model.with_config(model.config.replace(num_classes=3))
    """

    def __init__(self, config: ViTConfig, *, dtype: Any = None, name: str = "vit") -> None:
        if not isinstance(config, ViTConfig):
            raise TypeError(
                "VisionTransformer takes a config, as VisionTransformer(keras_vit.ViTConfig(image_size=224)); "
                f"keras_vit.zoo.load(name or path) loads a model. Received: {config!r:.200}"
            )
        policy = keras.dtype_policies.get(dtype if dtype is not None else keras.config.dtype_policy())
        if policy.quantization_mode is not None:
            raise ValueError(
                f"A VisionTransformer has a floating-point dtype policy, such as 'float32'. Received: {policy.name!r}"
            )
        check_patches(config)
        network = Network(config, policy)
        super().__init__(inputs=network.images, outputs=network.output, name=name)
        self.config = config
        self._policy = policy
        self.intermediates = network.intermediates
        # Cached functions instead of dicts: Keras would save models that it finds in a model's containers.
        tensors = self.intermediates
        self._feature_model = functools.cache(
            lambda names: keras.Model(network.images, {name: tensors[name] for name in names}, name=name)
        )
        self._block_input_model = functools.cache(lambda: keras.Model(network.images, network.block_inputs))

    @property
    def task(self) -> task.Classification:
        """Task of the output: how the model is trained, evaluated, exported and compared."""
        return task.from_config(self.config)

    def _assert_input_compatibility(self, inputs: Any) -> None:
        """Ask for prepared images before Keras asks for their shape: pixels are seldom of the model's size."""
        preprocess.check_floats(inputs)
        super()._assert_input_compatibility(inputs)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        """Compute the output; the last block computes only the tokens that the head reads."""
        preprocess.check_prepared(inputs, self.config)
        with runtime.final_tokens_only():
            return super().call(inputs, training=training, mask=mask, **kwargs)

    def features(self, images: Any, layers: Iterable[str] | None = None) -> dict[str, Any]:
        """Compute intermediate results for a batch of images.

        Args:
            images: float32 (batch, height, width, channels), as `preprocess` returns them.
            layers: names from `feature_names`; None means the tokens after every block, and "pre_logits".

        Returns:
            A dict from name to tensor, in the model's compute dtype: tokens (batch, tokens, hidden_size), feature maps
            of a hybrid's ResNet (batch, height, width, channels), "pre_logits" (batch, features).

        Raises:
            ValueError: the model has no intermediate result of this name.
        """
        if layers is None:
            layers = [name for name in self.feature_names if name.startswith("block_") or name == "pre_logits"]
        names = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        unknown = [name for name in names if not isinstance(name, str) or name not in self.intermediates]
        if unknown or not names:
            raise ValueError(f"layers are some of {self.feature_names}. Received: {str(unknown or list(names)):.200}")
        _check_batch("features", images, self.config)
        return self._feature_model(names)(images, training=False)

    def _repr_html_(self) -> str:
        """Show inputs and outputs as a table in notebooks."""
        config = self.config
        names = self.task.class_names() or []
        values = {
            "image": " x ".join(map(str, (*config.size, config.num_channels))),
            "patches": f"{config.grid[0]} x {config.grid[1]} of {config.stride[0]} x {config.stride[1]} pixels",
            "parameters": f"{self.count_params():,}",
            "blocks": f"{config.num_layers} of width {config.hidden_size:,}",
            "classes": f"{config.num_classes:,}" if config.num_classes else "none: it returns features",
            "names": ", ".join(names[:5]) + ", ..." * (len(names) > 5) if names else None,
            "dtype": self.layers[1].compute_dtype,
        }
        return html.facts(self.name, values)

    def feature_maps(self, images: Any, blocks: Blocks = None, *, norm: bool = True) -> list[Any]:
        """Compute the tokens of the patches after some blocks, as maps.

        The same as timm's `forward_intermediates` and as the feature maps of Hugging Face's backbones.

        Args:
            images: float32 (batch, height, width, channels), as `preprocess` returns them.
            blocks: numbers of blocks, from 0; a number n for the last n blocks; None for the last one. A list may also
                have names: "tokens" (before the first block), and of a hybrid's ResNet "root" and "stage_1" etc. In a
                BiT the numbers are those of its stages.
            norm: whether the final LayerNorm is applied to each map, if the model has one in front of the pooling; in a
                BiT, norm and ReLU to the last stage.

        Returns:
            A list of tensors (batch, rows, columns, width) in the model's compute dtype, one for each block.

        Raises:
            ValueError: the model has no such block.

        Example:
            >>> model = keras_vit.zoo.load("digits")
            >>> images = model.preprocess(keras_vit.digits.load().test_images[:2])
            >>> [tuple(feature_map.shape) for feature_map in model.feature_maps(images, blocks=2)]
            [(2, 8, 8, 64), (2, 8, 8, 64)]
        """
        names = map_names(self.config, blocks)
        tensors = self.features(images, names)
        return [to_map(self, name, tensors[name], norm=norm) for name in names]

    @property
    def feature_names(self) -> list[str]:
        """Names of the intermediate results that `features` returns, in the order of computation."""
        return list(self.intermediates)

    def attention_maps(self, images: Any) -> list[Any]:
        """Compute the attention weights of every block.

        Args:
            images: float32 (batch, height, width, channels), as `preprocess` returns them.

        Returns:
            A list of tensors (batch, heads, tokens, tokens), one for each block. Rows are queries; each sums to 1 (in
            bfloat16 within 2e-3).

        Raises:
            ValueError: the model has no attention, such as an MLP-Mixer.
        """
        check_attention(self.config)
        _check_batch("attention_maps", images, self.config)
        inputs = self._block_input_model()(images, training=False)
        names = (f"block_{i}" for i in range(self.config.num_layers))
        return [self.get_layer(name).attention_weights(*inputs[name]) for name in names]

    def preprocess(self, images: Any) -> np.ndarray:
        """Prepare images as `config.preprocessing` says: resized, normalized, in a batch.

        Args:
            images: one image or a list of images: uint8 or float arrays from 0 to 255 of (height, width, channels), PIL
                images, or paths or URLs of image files; or an array (batch, height, width, channels). Other values than
                bytes are those that `config.preprocessing` states in `bits` or `range`. PIL images and files are turned
                by their EXIF orientation.

        Returns:
            float32 (batch, height, width, channels).

        Raises:
            ValueError: an image has a wrong rank, number of channels, dtype or value range, or a file is not an image,
                is damaged or is too large; or a file of 16 bits has small values, and `bits` is not stated.
            FileNotFoundError: there is no file at a path.
        """
        return preprocess.prepare(
            images,
            image_size=self.config.size,
            num_channels=self.config.num_channels,
            preprocessing=self.config.preprocessing,
        )

    def decode_predictions(self, logits: Any, top: int = 5) -> list[list[Prediction]]:
        """Name the most probable classes of each image.

        Args:
            logits: (batch, num_classes), as the model returns them.
            top: number of classes for each image, from 1.

        Returns:
            For each image a list of (label_id, label, probability), most probable first. The label_id is the WordNet id
            where the list of labels has one, else the number of the class.

        Raises:
            ValueError: the logits have another shape, or `top` is less than 1.
        """
        return self.task.decode(keras.ops.convert_to_numpy(logits), top)

    def classify(self, images: Any, top: int = 5, *, batch_size: int = BATCH) -> list[list[Prediction]]:
        """Classify images: `preprocess`, compiled calls, `decode_predictions`.

        Args:
            images: as for `preprocess`; also paths of folders, whose image files are taken in the order of their sorted
                paths (those in sub-folders too), and patterns such as "photos/*.jpg".
            top: number of classes for each image, from 1.
            batch_size: number of images that are in memory and in a call at a time, from 1.

        Returns:
            For each image a list of (label_id, label, probability), most probable first.

        Raises:
            ValueError: an image cannot be read, or a number is less than 1; there is no image.
            FileNotFoundError: there is no file at a path, or no image in a folder.
        """
        self.task.check_classes(
            "classify (`embed` and `features` need none; zoo.load(name, weights=a tag of a file with classes) or "
            "train.run give one)"
        )
        results = []
        for result in classify_each(self, images, top=top, batch_size=batch_size):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        if not results:
            raise ValueError("classify needs at least one image. Received: an empty list")
        return results

    def predict(self, x: Any, *args: Any, **options: Any) -> Any:
        """Compute the logits of prepared images, as `keras.Model.predict` does.

        Args:
            x: prepared images, or a data set of them.
            *args: further arguments of `keras.Model.predict`.
            **options: further arguments of `keras.Model.predict`.

        Raises:
            ValueError: there is no image.
        """
        _check_batch("predict", x, self.config)
        return super().predict(x, *args, **options)

    def embed(self, images: Any, *, batch_size: int = BATCH) -> np.ndarray:
        """Embed images. Embeddings have length 1: dot products are cosine similarities.

        They are the feature "pre_logits", or the head's output if the head is a projection (`config.projection_head`).

        Args:
            images: as for `classify`.
            batch_size: number of images that are in memory and in a call at a time, from 1.

        Returns:
            float32 (images, width), in the order of the images.

        Raises:
            ValueError: an image cannot be read, or there is none; the model has a feature for every token.
            FileNotFoundError: there is no file at a path, or no image in a folder.
        """
        return embed_all(self, images, batch_size=batch_size)

    def resized(
        self,
        image_size: int | tuple[int, int] | None = None,
        method: str | None = None,
        *,
        patch_size: int | tuple[int, int] | None = None,
    ) -> VisionTransformer:
        """Build a model with the same weights for another image or patch size. Weights are interpolated once.

        Args:
            image_size: int or (height, width) in pixels; None means this model's.
            method: interpolation method of `position.resize`; None means the model's own.
            patch_size: int or (height, width) in pixels; None means this model's. Kernels are resized as FlexiViT's, by
                `position.resize_patches`. Other models than FlexiViT lose accuracy and need fine-tuning.

        Raises:
            ValueError: a size is wrong, or the model cannot be resized to it.
        """
        changes = given(image_size=image_size, patch_size=patch_size, position_method=method)
        return self.with_config(self.config.replace(**changes))

    def with_config(self, config: ViTConfig, *, dtype: Any = None, fresh: Sequence[str] = ()) -> VisionTransformer:
        """Build a model with the same weights and another config: resolution, head, dropout or dtype policy.

        Position embeddings and patches are interpolated. The kernel that reads the images is adapted to another
        `num_channels` by timm's rule: the sum for one channel, else repeated and scaled. A head with another number of
        classes, or of another feature, is new and zero. Kernels with LoRA are copied with LoRA's update.

        Args:
            config: config of the new model. What its weights do not depend on may differ; all else must agree.
            dtype: a Keras dtype policy or its name; None means this model's.
            fresh: names of further layers that get new weights; names that the new model does not have are ignored.

        Raises:
            ValueError: the weights do not fit the config.
        """
        kinds = [(c.representation_size, c.feature_size) for c in (config, self.config)]
        if kinds[0] != kinds[1]:
            fresh = ["pre_logits", *HEADS, *fresh]
        elif config.num_classes != self.config.num_classes:
            fresh = [*HEADS, *fresh]
        with contextlib.nullcontext() if fresh else runtime.uninitialized():
            other = VisionTransformer(config, dtype=dtype or self._policy, name=self.name)
        other._copy_weights(self, skip=fresh)
        other._freeze(entry for entry in self._frozen() if entry[0] not in fresh)
        return other

    def _copy_weights(self, source: VisionTransformer, *, skip: Sequence[str]) -> None:
        """Copy the weights of all layers but those in `skip` from a model of the same architecture."""
        if not any(name.startswith(("embedding", "block_")) for name in skip):
            check_resizable(source.config, self.config)
        for layer in self.layers:
            if layer.name in skip or not layer.weights:
                continue
            origin = source.get_layer(layer.name)
            for inner, inner_origin in zip(layer._flatten_layers(), origin._flatten_layers(), strict=True):
                store: dict[str, Any] = {}  # by number: "0" is the first variable, the kernel
                inner_origin.save_own_variables(store)
                # Copies: JAX's variables would share an array, which Keras' fit and predict give away.
                store = {name: np.array(value) for name, value in store.items()}
                if isinstance(inner, PatchEmbedding):
                    size, method = inner.patch_size, self.config.position_method
                    store["0"] = position.resize_patches(store["0"], size, method=method)
                if store and inner.weights[0].path.endswith(image_kernel(self.config)):
                    store["0"] = adapt_channels(store["0"], self.config.num_channels)
                inner.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Arguments of `from_config`: config, dtype policy, name, and the frozen layers."""
        policy = keras.dtype_policies.serialize(self._policy)
        return {"config": self.config.to_dict(), "dtype": policy, "name": self.name, "frozen": self._frozen()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> VisionTransformer:
        """Build a new model with initial weights from the result of `get_config`."""
        del custom_objects  # every layer is registered
        model = cls(ViTConfig(**config["config"]), dtype=config["dtype"], name=config["name"])
        model._freeze(config["frozen"])
        return model

    quantize = refuse_quantize

    def _frozen(self) -> list[list[Any]]:
        """List the frozen layers, inner layers included, as [outer layer, index among its inner layers]."""
        return [
            [layer.name, index]
            for layer in self.layers
            for index, part in enumerate(layer._flatten_layers())
            if not part.trainable
        ]

    def _freeze(self, frozen: Iterable[Sequence[Any]]) -> None:
        for name, index in frozen:
            list(self.get_layer(name)._flatten_layers())[index].trainable = False


def _check_batch(method: str, images: Any, config: ViTConfig) -> None:
    """Raise a ValueError for pixels, and for a batch of no images, of which TensorFlow cannot make a map."""
    preprocess.check_prepared(images, config)
    if tuple(getattr(images, "shape", ()))[:1] == (0,):
        raise ValueError(f"{method} needs at least one image. Received: an array of shape {tuple(images.shape)}")


def hash_weights(weights: Iterable[Any], start: str = "") -> str:
    """Compute the SHA-256 of a text and the values of weights."""
    digest = hashlib.sha256(start.encode())
    for weight in weights:
        digest.update(np.asarray(weight).tobytes())
    return digest.hexdigest()
