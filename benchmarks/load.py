"""Time and memory of building ViT-B/16 at 224 and loading its weights: keras_vit against its Keras peers.

    python benchmarks/load.py                            # keras_vit and numpy.load, in this environment
    python benchmarks/load.py --peers DIR --setup        # all of load.toml, each package in its environment under DIR

Every figure comes from a fresh process; the contenders take turns, in an order shuffled in each round.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FRAMEWORK: list[str] = TABLE.pop("framework")
OURS = "keras_vit"
MB = 1e6
TARGET_SPEED, TARGET_MEMORY = 1.5, 2.2  # against the fastest peer; against the bytes of the file
TOLERANCE = 1e-4  # of the largest logit: float32 noise through 12 blocks is 1e-6, a tensor left unread 1e-2 and more


def perturbed(model: Any) -> Any:
    """Moves every weight by seeded noise, so that none has a value that a model might start from."""
    rng = np.random.default_rng(0)
    for variable in model.weights:
        if "seed_generator" not in variable.path:
            variable.assign(variable + rng.normal(0, 0.02, variable.shape).astype(np.float32))
    return model


def logits(model: Any) -> np.ndarray:
    """What a model says of one seeded image."""
    image = np.random.default_rng(1).uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    return np.asarray(model(image, training=False))


def write_hugging_face(npz: Path, folder: Path) -> None:
    """Writes an official ViT-B/16 as the two files of a Hugging Face repository of ViTForImageClassification."""
    from safetensors.numpy import save_file  # type: ignore[import-not-found, unused-ignore]

    names = {
        "embedding": "vit.embeddings.patch_embeddings.projection",
        "Transformer/encoder_norm": "vit.layernorm",
        "head": "classifier",
    }
    for i in range(12):
        source, layer = f"Transformer/encoderblock_{i}", f"vit.encoder.layer.{i}"
        for part in ("query", "key", "value"):
            names[f"{source}/MultiHeadDotProductAttention_1/{part}"] = f"{layer}.attention.attention.{part}"
        names[f"{source}/MultiHeadDotProductAttention_1/out"] = f"{layer}.attention.output.dense"
        names[f"{source}/LayerNorm_0"] = f"{layer}.layernorm_before"
        names[f"{source}/LayerNorm_2"] = f"{layer}.layernorm_after"
        names[f"{source}/MlpBlock_3/Dense_0"] = f"{layer}.intermediate.dense"
        names[f"{source}/MlpBlock_3/Dense_1"] = f"{layer}.output.dense"
    tensors = {}
    with np.load(npz) as file:
        for source, name in names.items():
            kernel, bias = ("scale", "bias") if "norm" in source.lower() else ("kernel", "bias")
            tensors[f"{name}.bias"] = file[f"{source}/{bias}"].reshape(-1)
            value = file[f"{source}/{kernel}"]
            if kernel == "kernel":  # out channels first: (out, in), and (out, in, height, width) for the patches
                wide = value.reshape(768, -1) if value.shape[0] == 768 else value.reshape(-1, value.shape[-1])
                value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else wide.T
            tensors[f"{name}.weight"] = np.ascontiguousarray(value)
        tensors["vit.embeddings.cls_token"] = file["cls"]
        tensors["vit.embeddings.position_embeddings"] = file["Transformer/posembed_input/pos_embedding"]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": 224,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": True,
        "id2label": {str(i): str(i) for i in range(1000)},
    }
    (folder / "config.json").write_text(json.dumps(config))


def resident() -> int:
    """Bytes of memory that this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prepare(name: str, folder: Path) -> None:
    """Writes a contender's file, and the logits that the model gives from which it was written."""
    scope = {"folder": folder, **globals()}
    exec(TABLE[name].get("setup", ""), scope)
    exec(TABLE[name]["prepare"], scope)
    np.save(folder / f"{name}.npy", logits(scope["model"]))


def measure(name: str, folder: Path) -> dict[str, Any]:
    """One measurement, in a process that does nothing else."""
    contender, scope = TABLE[name], {"folder": folder, **globals()}
    load = compile(contender["load"], name, "exec")
    exec(contender["setup"], scope)
    imported = resident()
    start = time.perf_counter()
    exec(load, scope)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if contender["row"].startswith("numpy"):
        return {"seconds": seconds, "imported": imported, "peak": peak, "error": 0.0, "versions": {}}
    expected = np.load(folder / f"{contender.get('expects', name)}.npy")
    error = float(np.abs(logits(scope["model"]) - expected).max() / np.abs(expected).max())
    packages = ("tensorflow", "keras", "numpy") + (() if name == OURS else (contender["package"],))
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"seconds": seconds, "imported": imported, "peak": peak, "error": error, "versions": versions}
