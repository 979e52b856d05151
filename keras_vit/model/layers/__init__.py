"""Layers of a Vision Transformer, one concept in each file. They use `keras.ops` only, so every back end runs them."""

from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.block import MLP, EncoderBlock, LayerScale, final_tokens_only
from keras_vit.model.layers.initializers import uninitialized
from keras_vit.model.layers.pooling import AttentionPooling, L2Normalization, TokenPooling
from keras_vit.model.layers.position import PositionEmbedding
from keras_vit.model.layers.randomness import Dropout, StochasticDepth
from keras_vit.model.layers.resnet import GroupNormalization, ResNetRoot, ResNetUnit, StandardizedConv2D
from keras_vit.model.layers.tokens import PatchEmbedding, PrefixTokens

__all__ = [
    "MLP",
    "AttentionPooling",
    "Dropout",
    "EncoderBlock",
    "GroupNormalization",
    "L2Normalization",
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
