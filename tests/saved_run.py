"""The model and the run in tests/data/saved, for the script that wrote them and the tests that read them."""

from __future__ import annotations

from typing import Any

from keras_vit import ViTConfig

CONFIG = ViTConfig(
    image_size=16, patch_size=8, hidden_size=16, mlp_dim=32, num_heads=2, num_layers=2, num_classes=10, num_channels=1
)
HALF = 6
FIELDS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 16,
    "image_size": 16,
    "config": {"dropout_rate": 0.1},
    "ema_decay": 0.9,
    "xla": False,
    "checkpoint_steps": HALF,
    "checkpoint_minutes": None,
    "log_steps": 1,
    "eval_steps": 20,
}
