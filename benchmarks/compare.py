"""Compare exported files of ViT-B/16 and of SigLIP-B/16's image tower with those of other packages.

    python benchmarks/compare.py                        ours
    python benchmarks/compare.py --peers DIR --setup    and the others, each in its own environment under DIR

All files of a model have the same random weights: each package reads them from a file that keras_vit wrote, but for
SigLIP in Keras Hub, which has no reader for such files: there they are copied tensor by tensor. The files are timed in
one process, in a new random order in each round. `cosine` is the mean over all pairs of images of the cosine between
the difference of their outputs in the file and that in keras_vit's float64. Linux only (/proc).
"""

import argparse
import functools
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from edge import child, config, required
from edge_peers import FRAMEWORK, MODES, THREADS, keras_hub, measured, runner, timm_model, to_tflite, zeromodels

SCRIPT = Path(__file__).resolve()
sys.path.append(str(SCRIPT.parents[1] / "tests" / "support"))
VIT, SIGLIP = "ViT-B/16", "SigLIP-B/16"
IMAGES, REPEATS = 8, 3
OURS, HUB, ZERO, TORCH = "keras_vit", "keras-hub", "zeromodels", "litert-torch"
# Package: what pip installs in its environment.
ENVIRONMENTS = {
    HUB: (*FRAMEWORK, "keras-hub==0.32.0", "safetensors"),
    ZERO: (*FRAMEWORK, "zeromodels==1.3.6", "safetensors"),
    TORCH: ("litert-torch==0.10.0", "timm==1.0.31", "safetensors", "pytest"),
}


def prepare(name: str, folder: Path) -> None:
    """Write a model with random weights in the formats that the packages read, images, and their float64 outputs."""
    from keras_vit import VisionTransformer, converters, zoo
    from outlier_models import images, standardise

    facts = config("B/16") if name == VIT else zoo.load(name, weights=None, image_size=224).config
    model = standardise(VisionTransformer(facts), np.random.default_rng(0))
    with warnings.catch_warnings(action="ignore"):
        for target, format in {"timm": "timm", "huggingface": "huggingface" + "_siglip" * (name == SIGLIP)}.items():
            converters.save(model, folder / target, format=format)
    wide = VisionTransformer(facts, dtype="float64")
    for variable, weight in zip(wide.weights, model.weights, strict=True):
        variable.assign(weight)
    shown = images(facts, IMAGES)
    np.save(folder / "images.npy", shown)
    np.save(folder / "outputs.npy", np.concatenate([wide.predict_on_batch(image[None]) for image in shown]))


def siglip_of_keras_hub(folder: Path) -> Any:
    """Build Keras Hub's image tower and copy the weights."""
    import keras
    from keras_hub.src.models.siglip.siglip_vision_encoder import SigLIPVisionEncoder
    from safetensors.numpy import load_file

    tower = SigLIPVisionEncoder(16, 768, 12, 12, 3072, image_shape=(224, 224, 3))
    given = load_file(folder / "huggingface" / "model.safetensors")
    for name in ("weight", "bias"):
        thirds = np.split(given[f"vision_model.head.attention.in_proj_{name}"], 3)
        given |= {f"vision_model.head.attention.{p}_proj.{name}": t for p, t in zip("qkv", thirds, strict=True)}
    words = {"/embedding/": "/embeddings/", "encoder_block_": "encoder/layers/", "post_layer_norm": "post_layernorm"}
    words |= {"head/variable": "head/probe", "position_embedding/embeddings": "position_embedding/weight"}
    words |= {"/query/": "/q_proj/", "/key/": "/k_proj/", "/value/": "/v_proj/", "attention_output": "out_proj"}
    words |= {"kernel": "weight", "gamma": "weight", "beta": "bias"}
    for variable in tower.trainable_variables:
        path = "vision_model/" + variable.path
        for old, new in words.items():
            path = path.replace(old, new)
        value = given[path.replace("/", ".")]
        if variable.path.endswith("kernel"):
            value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
        variable.assign(value.reshape(variable.shape))
    return keras.Model(tower.inputs[0], tower.outputs[0])


def siglip_of_zeromodels(folder: Path) -> Any:
    """Read a Hugging Face file with the package's own reader."""
    import keras
    from safetensors.numpy import load_file

    stand_in = types.SimpleNamespace(Tensor=(), nn=types.SimpleNamespace(Module=()))
    sys.modules.setdefault("torch", stand_in)  # type: ignore[arg-type]  # as in edge_peers
    from zeromodels.models.siglip import SigLIPVisionModel

    tower = SigLIPVisionModel()
    SigLIPVisionModel.transfer_from_hf(tower, load_file(folder / "huggingface" / "model.safetensors"))
    return keras.Model(tower.inputs[0], tower.output["pooler_output"])


def by_litert_torch(model: Any, mode: str, target: Path) -> None:
    """Convert timm's model; in int8 by AI Edge Quantizer's recipe for ranges at run time.

    LiteRT does not load that file of a SigLIP (a BATCH_MATMUL has a first factor in int8 and a second in float32): of
    such a model only dense layers and convolutions are quantized.
    """
    import litert_torch
    import torch
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import qtyping, quantizer, recipe

    image = torch.zeros(1, *model.default_cfg["input_size"][1:], 3)
    float_file = target.with_name(f"{TORCH}-none.tflite")
    if mode == "none":
        litert_torch.convert(litert_torch.to_channel_last_io(model, args=[0]), (image,)).export(str(float_file))
        return
    made = quantizer.Quantizer(str(float_file), recipe.dynamic_wi8_afp32())
    made.quantize().export_model(str(target), overwrite=True)
    try:
        Interpreter(str(target)).allocate_tensors()
    except RuntimeError:
        made = quantizer.Quantizer(str(float_file))
        for operator in (qtyping.TFLOperationName.FULLY_CONNECTED, qtyping.TFLOperationName.CONV_2D):
            made.add_dynamic_config(regex=".*", operation_name=operator, num_bits=8)
        made.quantize().export_model(str(target), overwrite=True)


def export_ours(model: Any, mode: str, target: Path) -> None:
    """Write our file; the seconds include its check against the model."""
    from keras_vit.export import tflite

    tflite(model, target, quantize=mode)


def load_ours(folder: Path) -> Any:
    """Read timm's file."""
    from keras_vit import converters

    return converters.load(folder / "timm")


# Package and model: the function that builds the model, and the one that writes the file.
ROADS: dict[tuple[str, str], tuple[Callable[[Path], Any], Callable[[Any, str, Path], None]]] = {
    (OURS, VIT): (load_ours, export_ours),
    (OURS, SIGLIP): (load_ours, export_ours),
    (HUB, VIT): (keras_hub, to_tflite),
    (HUB, SIGLIP): (siglip_of_keras_hub, to_tflite),
    (ZERO, VIT): (zeromodels, to_tflite),
    (ZERO, SIGLIP): (siglip_of_zeromodels, to_tflite),
    (TORCH, VIT): (timm_model, by_litert_torch),
    (TORCH, SIGLIP): (timm_model, by_litert_torch),
}


def export(package: str, name: str, folder: Path) -> dict[str, Any]:
    """Write a package's files; return the seconds of each, without loading, and the memory that it added."""
    load, write = ROADS[package, name]
    model, found = load(folder), {}
    for mode in MODES:
        _, figures = measured(functools.partial(write, model, mode, folder / f"{package}-{mode}.tflite"))
        found[mode] = figures["seconds"], figures["added"]
    return found


def timed(folder: Path, rounds: int) -> dict[str, Any]:
    """Run all files of a model alternately; return the milliseconds, megabytes and cosine of each."""
    from outlier_models import score

    shown, expected = np.load(folder / "images.npy"), np.load(folder / "outputs.npy").astype(np.float64)
    runs = {path.stem: runner(path) for path in sorted(folder.glob("*.tflite"))}
    files: dict[str, Any] = {}
    for name, run in runs.items():
        outputs = np.concatenate([run(image[None]) for image in shown]).astype(np.float64)
        size = (folder / f"{name}.tflite").stat().st_size
        files[name] = {"cosine": score(expected, outputs), "bytes": size, "ms": []}
    order, others = random.Random(0), []

    def turns() -> None:
        for name in order.sample(list(runs), len(runs)):
            runs[name](shown[:1])  # the caches hold the previous file's data
            for _ in range(REPEATS):
                start = time.perf_counter()
                runs[name](shown[:1])
                files[name]["ms"].append(1000 * (time.perf_counter() - start))

    for _ in range(rounds):
        others.append(measured(turns)[1]["others"])
    return {"files": files, "others": statistics.median(others)}


def report(name: str, exports: dict[str, Any], found: dict[str, Any]) -> None:
    """Print a row for each file."""
    print(f"\n{name}; others took {found['others']:.1f} processors")
    print(f"{'file':24}{'ms':>9}{'best':>9}{'MB':>9}{'cosine':>10}{'export s':>10}{'added MB':>10}")
    for mode in MODES:
        for package in exports:
            row = found["files"].get(f"{package}-{mode}")
            if row is None:
                print(f"{package + ', ' + mode:24} {str(exports[package])[:150]}")
                continue
            seconds, added = exports[package][mode]
            print(
                f"{package + ', ' + mode:24}{statistics.median(row['ms']):9.1f}{min(row['ms']):9.1f}"
                f"{row['bytes'] / 1e6:9.1f}{row['cosine']:10.6f}{seconds:10.1f}{added / 1e6:10.0f}"
            )


def compare(options: argparse.Namespace, work: Path) -> None:
    """Measure both models and print the report."""
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    packages = [OURS, *(ENVIRONMENTS if options.peers else ())]
    print(f"{time.strftime('%Y-%m-%d')},{processor.split(':')[1]}, {os.cpu_count()} CPUs, {THREADS} threads;", end=" ")
    print(f"one image of 224 px, {options.rounds} rounds of {REPEATS} calls in one process; random weights;", end=" ")
    print(f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}")
    print(f"export s: of {OURS} with its check of the file; of {TORCH} in dynamic from the float32 file")
    print("\n".join(" ".join(ENVIRONMENTS[package]) for package in packages[1:]))
    for name in options.models:
        folder = work / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "outputs.npy").exists():
            required(child(sys.executable, SCRIPT, "--child", "prepare", name, folder))
        exports = {}
        for package in packages:
            python = sys.executable if package == OURS else options.peers.absolute() / package / "bin" / "python"
            exports[package] = child(python, SCRIPT, "--child", "export", package, name, folder)
        report(name, exports, required(child(sys.executable, SCRIPT, "--child", "timed", folder, options.rounds)))


def main() -> None:
    """Read the command line; run the comparison, or one step as its child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where the environments of the packages are")
    parser.add_argument("--setup", action="store_true", help="create them first")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the files there")
    parser.add_argument("--models", nargs="+", choices=(VIT, SIGLIP), default=[VIT, SIGLIP])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, *given = options.child
        steps = {
            "prepare": lambda name, folder: prepare(name, Path(folder)),
            "export": lambda package, name, folder: export(package, name, Path(folder)),
            "timed": lambda folder, rounds: timed(Path(folder), int(rounds)),
        }
        print(json.dumps(steps[step](*given)))  # type: ignore[operator]
        return
    if options.setup and not options.peers:
        parser.error("--setup needs --peers DIR")
    for package, requirements in ENVIRONMENTS.items() if options.setup else ():
        subprocess.run([sys.executable, "-m", "venv", options.peers / package], check=True)
        subprocess.run([options.peers / package / "bin" / "pip", "install", "--quiet", *requirements], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        compare(options, (options.work or Path(temporary)).absolute())


if __name__ == "__main__":
    main()
