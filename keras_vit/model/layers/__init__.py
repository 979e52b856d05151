"""Layers of a Vision Transformer, one concept in each file. They use `keras.ops` only, so every back end runs them."""

from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.block import EncoderBlock
from keras_vit.model.layers.dropout import Dropout, StochasticDepth
from keras_vit.model.layers.mlp import MLP
from keras_vit.model.layers.norm import L2Normalization, LayerNormalization, LayerScale
from keras_vit.model.layers.pooling import AttentionPooling, TokenPooling
from keras_vit.model.layers.position import PositionEmbedding
from keras_vit.model.layers.resnet import GroupNormalization, ResNetRoot, ResNetUnit, StandardizedConv2D
from keras_vit.model.layers.runtime import final_tokens_only, uninitialized
from keras_vit.model.layers.tokens import PatchEmbedding, PrefixTokens

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
