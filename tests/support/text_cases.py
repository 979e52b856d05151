"""The reference cases of text towers and tokenizers: tiny files with the results of the official code."""

from __future__ import annotations

import json
from typing import Any

import keras

from keras_vit.text import TextConfig, TextEncoder, Tokenizer
from places import DATA

FOLDER = DATA / "text"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((FOLDER / "manifest.json").read_text())["cases"]
}
TOWERS = [name for name, case in CASES.items() if "tolerance" in case]
TOKENIZERS = ["tok_clip", "tok_siglip", "tok_siglip2"]
STRINGS: list[str] = json.loads((FOLDER / "strings.json").read_text(encoding="utf-8"))
OUTPUTS = ("text/text_features", "text/text_embeds", "text/pooler_output")  # the first that a case has
# Tokenizer and config of each kind of encoder that is exported.
SIGLIP = {"causal": False, "pooling": "last", "projection_bias": True, "activation": "gelu_tanh", "norm_epsilon": 1e-6}
EXPORTED = {
    "largest id": ("tok_clip", {}),
    "end token": ("tok_clip", {"end_token": 789, "activation": "gelu_erf", "layer_scale": 0.5}),
    "siglip": ("tok_siglip", SIGLIP),
    "siglip 2": ("tok_siglip2", SIGLIP | {"projection_size": 0, "projection_bias": False}),
    "first token": ("tok_clip", {"pooling": "first"}),
}


def small_encoder(tokenizer: str = "tok_clip", **changes: Any) -> TextEncoder:
    """Return a text encoder with random weights and one of the small tokenizers, of 16 tokens."""
    tok = Tokenizer.load(FOLDER / tokenizer, 16)
    keras.utils.set_random_seed(3)
    fields = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 64, "projection_size": 24, **changes}
    return TextEncoder(TextConfig(vocab_size=tok.vocab_size, max_length=16, **fields), tok)
