"""The checkpoint formats that a model can be written in."""

from __future__ import annotations

from keras_vit.converters.expressible import formats_of

writable = formats_of
