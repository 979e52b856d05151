"""Heads that turn the tokens of some blocks into a map, as graphs of Keras layers."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_vit.dense.config import MapConfig
from keras_vit.model.layers import EncoderBlock, LayerNormalization, PrefixTokens
from keras_vit.model.layers.base import activation_function, dense_layer
from keras_vit.model.maps import DepthBins, FirstTokens, MaskLogits, PatchMap, ResizeBilinear, map_names, to_map
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.model.vit import rotary_arguments

NORM_EPSILON = 1e-5  # of PyTorch's batch normalization


class MapHead:
    """Symbolic Keras tensors of a head on a backbone; `output` is the map, or a dict of tensors."""

    def __init__(self, backbone: VisionTransformer, config: MapConfig) -> None:
        self.config = config
        self.image_size = tuple(
            cells * stride for cells, stride in zip(backbone.config.grid, backbone.config.stride, strict=True)
        )
        self.policy = backbone.layers[1].dtype_policy
        self.output_dtype = backbone.outputs[0].dtype  # at least float32
        self.options = {"dtype": self.policy}
        if config.kind == "queries":
            self.output = self._queries(backbone)
            return
        if config.readout != "ignore" and backbone.config.num_class_tokens > 1:
            raise ValueError(
                f"readout={config.readout!r} needs a single class token; several are left out with readout='ignore'. "
                f"Received: num_class_tokens={backbone.config.num_class_tokens}"
            )
        class_token = {"ignore": "drop", "project": "concat"}.get(config.readout, config.readout)
        names = map_names(backbone.config, config.blocks)
        maps = [
            to_map(backbone, name, backbone.intermediates[name], norm=config.norm, class_token=class_token)
            for name in names
        ]
        x = self._linear(maps) if config.kind == "linear" else self._dpt(maps)
        if config.output == "depth":
            x = keras.layers.Reshape(x.shape[1:3], name="map", dtype=self.output_dtype)(x)
        self.output = x

    # ---- a dense layer for every cell (DINOv2, arXiv 2304.07193, section 7.4)

    def _linear(self, maps: Sequence[Any]) -> Any:
        c = self.config
        x = keras.layers.Concatenate(name="map_features", **self.options)(maps) if len(maps) > 1 else maps[0]
        if c.batch_norm:
            x = self._batch_norm("map_norm", x)
        if c.output == "classes":
            return self._enlarge(self._classes(x))
        x = self._enlarge(dense_layer(c.num_bins, name="map_bins", **self.options)(x))
        return DepthBins(c.min_depth, c.max_depth or 0.0, name="map_depth", dtype=self.output_dtype)(x)

    def _enlarge(self, x: Any) -> Any:
        factor = self.config.upsample
        return x if factor == 1 else self._resize("map_enlarged", x, [factor * side for side in x.shape[1:3]])

    def _classes(self, x: Any) -> Any:
        return dense_layer(self.config.num_classes, name="map_logits", dtype=self.output_dtype)(x)

    # ---- DPT (arXiv 2103.13413, section 3)

    def _dpt(self, maps: Sequence[Any]) -> Any:
        maps = [self._reassemble(i, x) for i, x in enumerate(maps)]
        width = self.config.fusion_width
        maps = [self._convolve(f"neck_{i}", x, width, use_bias=False) for i, x in enumerate(maps)]
        x = None
        for number, finer in enumerate(reversed(maps)):
            last = number == len(maps) - 1
            following = None if last or self.config.fusion_size == "double" else maps[-2 - number]
            x = self._fuse(number, x, finer, following)
        if self.config.projection:
            x = self._activate("relu", "map_projected", self._convolve("map_projection", x, width))
        return self._class_map(x) if self.config.output == "classes" else self._depth_map(x)

    def _reassemble(self, i: int, x: Any) -> Any:
        """Give a map of tokens its width and its size."""
        c = self.config
        if isinstance(c.blocks[i], str):
            return x
        if c.readout == "project":
            gelu = activation_function("gelu_erf")
            x = dense_layer(x.shape[-1] // 2, activation=gelu, name=f"readout_{i}", **self.options)(x)
        width, factor = c.widths[i], c.factors[i]
        x = dense_layer(width, name=f"reassemble_{i}", **self.options)(x)
        if factor > 1:
            return self._on_maps("Conv2DTranspose", width, int(factor), int(factor), name=f"resize_{i}")(x)
        return x if factor == 1 else self._convolve(f"resize_{i}", x, width, strides=round(1 / factor))

    def _fuse(self, number: int, coarser: Any, x: Any, following: Any) -> Any:
        """Add a finer map to the sum of the coarser ones, and enlarge the result for the map that follows."""
        name = f"fusion_{number}"
        if coarser is not None:
            if x.shape[1:3] != coarser.shape[1:3]:
                x = self._resize(f"{name}_fitted", x, coarser.shape[1:3])
            residual = self._residual_unit(f"{name}_unit1", x)
            x = keras.layers.Add(name=f"{name}_sum", **self.options)([coarser, residual])
        x = self._residual_unit(f"{name}_unit2", x)
        # The official code enlarges first. A dense layer commutes with interpolation, and has a quarter of the cells.
        x = dense_layer(self.config.fusion_width, name=f"{name}_projection", **self.options)(x)
        size = [2 * side for side in x.shape[1:3]] if following is None else following.shape[1:3]
        return self._resize(f"{name}_enlarged", x, size, align_corners=True)

    def _residual_unit(self, name: str, x: Any) -> Any:
        branch = x
        for step in (1, 2):
            branch = self._activate("relu", f"{name}_relu{step}", branch)
            branch = self._convolve(f"{name}_conv{step}", branch, x.shape[-1], use_bias=self.config.residual_bias)
            if self.config.batch_norm:
                branch = self._batch_norm(f"{name}_norm{step}", branch)
        return keras.layers.Add(name=name, **self.options)([x, branch])

    def _class_map(self, x: Any) -> Any:
        x = self._batch_norm("map_norm", self._convolve("map_conv1", x, x.shape[-1], use_bias=False))
        x = self._classes(self._activate("relu", "map_relu", x))
        return self._resize("map_enlarged", x, self._head_size(x), align_corners=True)

    def _depth_map(self, x: Any) -> Any:
        c = self.config
        x = self._convolve("map_conv1", x, x.shape[-1] // 2)
        x = self._resize("map_enlarged", x, self._head_size(x), align_corners=True)
        x = self._activate("relu", "map_relu", self._convolve("map_conv2", x, c.head_width))
        x = dense_layer(1, name="map_depth", dtype=self.output_dtype)(x)
        if c.activation != "linear":
            x = keras.layers.Activation(c.activation, name="map_activation", dtype=self.output_dtype)(x)
        scale = c.max_depth if c.activation == "sigmoid" and c.max_depth else 1.0
        if (scale, c.min_depth) == (1.0, 0.0):
            return x
        return keras.layers.Rescaling(scale, c.min_depth, name="map_scaled", dtype=self.output_dtype)(x)

    def _head_size(self, x: Any) -> Sequence[int]:
        return self.image_size if self.config.head_size == "image" else [2 * side for side in x.shape[1:3]]

    # ---- EoMT (arXiv 2503.19108, section 3)

    def _queries(self, backbone: VisionTransformer) -> dict[str, Any]:
        """Let learned tokens pass the last blocks with the others; each becomes a class, and a mask by a product."""
        c, config = self.config, backbone.config
        if (config.position_place, config.relative_bias, config.rotary_learned) != ("stem", "none", False):
            raise ValueError(
                "kind='queries' needs position_place='stem', relative_bias='none' and rotary_learned=False of the "
                "backbone: its queries have no place among the patches. Received: "
                f"{config.position_place!r}, {config.relative_bias!r} and {config.rotary_learned}"
            )
        (name,) = map_names(config, c.blocks)
        tokens = PrefixTokens(class_token=False, num_registers=c.num_queries, name="queries", **self.options)
        x = tokens(backbone.intermediates[name])
        for i in range(config.num_layers, config.num_layers + c.query_blocks):
            rotary = rotary_arguments(config, queries=c.num_queries)
            x = EncoderBlock(config.block, rotary=rotary, name=f"block_{i}", **self.options)(x)
        x = backbone.get_layer("encoder_norm")(x)
        prefix = c.num_queries + config.num_prefix_tokens
        maps = PatchMap(config.grid, prefix_tokens=prefix, name="map_patches", **self.options)(x)
        queries = FirstTokens(c.num_queries, name="map_queries", **self.options)(x)
        classes = dense_layer(c.num_classes + 1, name="class_logits", dtype=self.output_dtype)(queries)
        gelu = activation_function("gelu_erf")
        for i, function in enumerate((gelu, gelu, None), start=1):
            queries = dense_layer(config.hidden_size, activation=function, name=f"mask_{i}", **self.options)(queries)
        for i in range(c.upsample.bit_length() - 1):
            name = f"upscale_{i}"
            up = self._on_maps("Conv2DTranspose", config.hidden_size, 2, 2, activation=gelu, name=name)
            cells = self._on_maps("DepthwiseConv2D", 3, padding="same", use_bias=False, name=f"{name}_cells")
            maps = LayerNormalization(epsilon=1e-6, name=f"{name}_norm", **self.options)(cells(up(maps)))
        masks = MaskLogits(name="mask_logits", dtype=self.output_dtype)(queries, maps)
        return {"class_logits": classes, "mask_logits": masks}

    # ---- layers

    def _on_maps(self, kind: str, *arguments: Any, **options: Any) -> Any:
        """Make one of Keras' layers of images and maps. Channels are last whatever keras.json says."""
        return getattr(keras.layers, kind)(*arguments, data_format="channels_last", **options, **self.options)

    def _convolve(self, name: str, x: Any, width: int, *, strides: int = 1, use_bias: bool = True) -> Any:
        """Convolve with 3x3 cells and a border of zeros; with a stride, "same" would pad fewer in front."""
        if strides > 1:
            x = self._on_maps("ZeroPadding2D", 1, name=f"{name}_padded")(x)
        padding = "same" if strides == 1 else "valid"
        return self._on_maps("Conv2D", width, 3, strides, padding=padding, use_bias=use_bias, name=name)(x)

    def _batch_norm(self, name: str, x: Any) -> Any:
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=NORM_EPSILON, name=name, **self.options)(x)

    def _activate(self, function: str, name: str, x: Any) -> Any:
        return keras.layers.Activation(function, name=name, **self.options)(x)

    def _resize(self, name: str, x: Any, size: Sequence[int], *, align_corners: bool = False) -> Any:
        return ResizeBilinear((size[0], size[1]), align_corners=align_corners, name=name, dtype=x.dtype)(x)
