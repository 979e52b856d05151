"""Models of timm and transformers with random weights, written and read by their own code."""

from __future__ import annotations

import contextlib
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def import_torch() -> Any:
    """Return PyTorch, or skip the test. It is imported when a test runs: collecting the tests loads no PyTorch."""
    return pytest.importorskip("torch", reason="PyTorch is not installed")


class _Module(types.ModuleType):
    """A module in which every attribute is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return enum.Enum(name, "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS NEAREST_EXACT")
        return type(name, (), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provide an empty torchvision: timm imports it for its image pipeline, which models do not need."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _torchvision() -> Iterator[None]:
    if importlib.util.find_spec("torchvision"):
        yield
        return
    finder = _StandIn()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def import_timm() -> Any:
    """Return timm, or skip the test."""
    with _torchvision():
        return pytest.importorskip("timm", reason="timm is not installed")


def randomised(model: Any, seed: int = 0) -> Any:
    """Return the model in evaluation mode with random weights, none of them zero or one."""
    torch = import_torch()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model.eval()


def outputs(model: Any, images: np.ndarray, **options: Any) -> np.ndarray:
    """Return their model's output for images (batch, height, width, channels): for transformers the logits,
    the pooler's output or the class token."""
    torch = import_torch()
    with torch.no_grad():
        result = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), **options)
    if not isinstance(result, torch.Tensor):
        first = next(
            name for name in ("logits", "image_embeds", "pooler_output", "last_hidden_state") if name in result
        )
        result = result[first][:, 0] if first == "last_hidden_state" else result[first]
    return result.numpy()


def saved_by_timm(folder: Path, architecture: str, model_args: dict[str, Any], *, half: bool = False) -> Any:
    """Write a random model of timm to a folder as on the hub, and return it."""
    timm = import_timm()
    model = randomised(timm.create_model(architecture, pretrained=False, **model_args))
    model = model.half().float() if half else model  # values that float16 can represent
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return model


def loaded_by_timm(folder: Path, **options: Any) -> Any:
    """Return the model that timm loads from a folder."""
    return import_timm().create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


def saved_by_transformers(folder: Path, kind: str, config: dict[str, Any]) -> Any:
    """Write a random model of a class of transformers to a folder, and return it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = randomised(getattr(transformers, kind)(transformers.ViTConfig(**config)))
    model.save_pretrained(folder)
    return model


def loaded_by_transformers(folder: Path, kind: str, **options: Any) -> Any:
    """Return the model that transformers loads from a folder, with no tensor but a mask token missing or left over."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    missing = [name for name in report.pop("missing_keys") if not name.endswith("mask_token")]
    assert not any((missing, *report.values())), (missing, report)
    return model.eval()
