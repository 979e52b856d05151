"""Layers of a Vision Transformer, one concept in each file. They use `keras.ops` only, so every back end runs them."""

from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import Dropout, L2Normalization, LayerNormalization, LayerScale, StochasticDepth
from keras_vit.model.layers.block import MLP, EncoderBlock
from keras_vit.model.layers.position import PositionEmbedding
from keras_vit.model.layers.resnet import GroupNormalization, ResNetRoot, ResNetUnit, StandardizedConv2D
from keras_vit.model.layers.runtime import final_tokens_only, uninitialized
from keras_vit.model.layers.tokens import AttentionPooling, PatchEmbedding, PrefixTokens, TokenPooling

__all__ = [
    "MLP",
    "AttentionPooling",
    "Dropout",
    "EncoderBlock",
    "GroupNormalization",
    "L2Normalization",
    "LayerNormalization",
    "LayerScale",
    "MultiHeadAttention",
    "PatchEmbedding",
    "PositionEmbedding",
    "PrefixTokens",
    "ResNetRoot",
    "ResNetUnit",
    "StandardizedConv2D",
    "StochasticDepth",
    "TokenPooling",
    "final_tokens_only",
    "uninitialized",
]
