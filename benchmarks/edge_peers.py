"""Build, export and time the models of other packages for edge.py.

    python edge_peers.py PEER MODE FOLDER TARGET      run by edge.py with the interpreter of the package's environment
    python edge_peers.py time FOLDER ROUNDS           run with the interpreter of the environment with the runtimes

FOLDER has calibration.npy and one model's weights: google.npz, timm/ and, without a ResNet, huggingface/. For the
timing it also has all files, images.npy and logits.npy. This script does not import keras_vit.
"""

import functools
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ONNX, OPENVINO, OPENVINO_BF16 = "onnxruntime", "openvino", "openvino_bf16"
# Runtimes that all run in the environment of the timing: the suffix of their files. OpenVINO runs each file twice, and
# computes what is not int8 in float32, then in bfloat16.
SUFFIXES = {ONNX: ".onnx", OPENVINO: ".xml", OPENVINO_BF16: ".xml"}
FRAMEWORK = ("tensorflow==2.21.0", "keras==3.15.1")
# The environment of the timing: all runtimes in one process. torch and timm write the other runtimes' files.
RUNTIMES = ("ai-edge-litert==2.3.0", "onnxruntime", "onnx", "onnxscript", "openvino", "nncf", "torch", "timm", "pytest")
# Environment: packages that pip installs. The first three are Keras packages.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "keras-hub": (*FRAMEWORK, "keras-hub==0.32.0", "safetensors"),
    "vit-keras": (*FRAMEWORK, "vit-keras==0.2.0", "opencv-python-headless"),
    "zeromodels": (*FRAMEWORK, "zeromodels==1.3.6", "safetensors"),
    ONNX: RUNTIMES,
}
THREADS = 2
REPEATS = 3  # calls of a file in a round, after one that is not counted: the caches hold the previous file's data
MODES = ("none", "dynamic")  # float32; int8 weights, with the inputs of matrix products quantized at run time


def keras_hub(folder: Path) -> Any:
    """Load a Hugging Face file with the package's own reader."""
    from keras_hub.models import ViTImageClassifier

    return ViTImageClassifier.from_preset(str(folder / "huggingface"), activation=None, preprocessor=None)


def vit_keras(folder: Path) -> Any:
    """Load an official file with the package's own reader."""
    from vit_keras import utils, vit

    arguments = timm_config(folder)
    side = arguments["img_size"] // arguments["patch_size"]
    model = vit.build_model(
        image_size=arguments["img_size"],
        patch_size=arguments["patch_size"],
        num_layers=arguments["depth"],
        hidden_size=arguments["embed_dim"],
        num_heads=arguments["num_heads"],
        mlp_dim=int(arguments["embed_dim"] * arguments["mlp_ratio"]),
        classes=arguments["num_classes"],
        name="vit",
    )
    utils.load_weights_numpy(model, folder / "google.npz", True, num_x_patches=side, num_y_patches=side)
    return model


def zeromodels(folder: Path) -> Any:
    """Load timm's weights with the package's own reader."""
    from safetensors.numpy import load_file

    # The reader tests whether arrays and model are PyTorch's; an empty stand-in for PyTorch is enough for this.
    stand_in = types.SimpleNamespace(Tensor=(), nn=types.SimpleNamespace(Module=()))
    sys.modules.setdefault("torch", stand_in)  # type: ignore[arg-type]
    from zeromodels.models.vit import ViTImageClassify

    arguments = timm_config(folder)
    names = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes")
    model = ViTImageClassify(**{name: arguments[name] for name in names}, image_size=arguments["img_size"])
    ViTImageClassify.transfer_from_timm(model, load_file(folder / "timm" / "model.safetensors"))
    return model


def timm_model(folder: Path) -> Any:
    """Build timm's PyTorch model."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from torch_peers import import_timm  # torchvision may be missing, or built for another PyTorch

    return import_timm().create_model(f"local-dir:{folder / 'timm'}", pretrained=True).eval()


def timm_config(folder: Path) -> dict[str, Any]:
    """Return the architecture as arguments of timm."""
    arguments: dict[str, Any] = json.loads((folder / "timm" / "config.json").read_text())["model_args"]
    return arguments


def to_tflite(model: Any, mode: str, target: Path) -> None:
    """Convert a Keras model by TensorFlow's converter: one image per call, builtin operators only."""
    import tensorflow as tf

    module = tf.Module()
    module.weights = [
        variable.value for variable in model.variables
    ]  # if it gets the model itself, the converter loses them
    image = tf.TensorSpec((1, *model.input_shape[1:]), tf.float32, name="image")
    serve = tf.function(lambda image: {"logits": model(image, training=False)}, input_signature=[image])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([serve.get_concrete_function()], module)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    if mode == "dynamic":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    target.write_bytes(converter.convert())


def to_onnx(model: Any, mode: str, target: Path) -> None:
    """Export by PyTorch: one image per call; matrix products in int8 with a scale for each output channel."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    image = torch.zeros(1, *model.default_cfg["input_size"])
    torch.onnx.export(model, (image,), target, dynamo=True, external_data=False, verbose=False)
    if mode == "dynamic":
        exported = onnx.load(target)
        del exported.graph.value_info[:]  # has old shapes of transposed weights, which the quantizer refuses
        products = {"op_types_to_quantize": ["MatMul", "Gemm"], "weight_type": QuantType.QInt8}
        quantize_dynamic(exported, target, per_channel=True, **products)


def to_openvino(model: Any, mode: str, target: Path) -> None:
    """Convert a PyTorch model: one image per call; int8 with fixed ranges, OpenVINO's way for a Transformer."""
    import openvino
    import torch

    image = torch.zeros(1, *model.default_cfg["input_size"])
    converted = openvino.convert_model(model, example_input=image, input=[tuple(image.shape)])
    if mode == "dynamic":
        import nncf

        images = np.load(target.parent / "calibration.npy").transpose(0, 3, 1, 2)
        calibration = nncf.Dataset([image[None] for image in images])
        converted = nncf.quantize(converted, calibration, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(converted, target, compress_to_fp16=False)


# Environment or runtime: the function that builds the model, and the one that writes the file.
PEERS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, str, Path], None]]] = {
    "keras-hub": (keras_hub, to_tflite),
    "vit-keras": (vit_keras, to_tflite),
    "zeromodels": (zeromodels, to_tflite),
    ONNX: (timm_model, to_onnx),
    OPENVINO: (timm_model, to_openvino),
}


def memory(name: str) -> int:
    """Return the resident bytes of this process: now ("VmRSS") or at the peak ("VmHWM")."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].removesuffix("kB")) * 1024


def worked() -> float:
    """Return the busy seconds of all processors, for all processes of the machine."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the result of the work, its seconds, the peak of the memory that it added, and the number of processors
    that other programs used.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before, everybody, cpu, start = memory("VmRSS"), worked(), time.process_time(), time.perf_counter()
    result = work()
    seconds, added = time.perf_counter() - start, memory("VmHWM") - before
    others = max(0.0, worked() - everybody - (time.process_time() - cpu)) / seconds
    return result, {"seconds": seconds, "added": added, "others": others}


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def runner(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that runs a file on one image (1, height, width, 3)."""
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        # Spinning threads would slow the next file.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda image: session.run(None, {name: np.ascontiguousarray(image.transpose(0, 3, 1, 2))})[0]
    if path.suffix == ".xml":
        import openvino

        precision = "bf16" if path.name.startswith(OPENVINO_BF16) else "f32"  # of all that is not in int8
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1}
        compiled = openvino.Core().compile_model(path, "CPU", settings)
        return lambda image: compiled([np.ascontiguousarray(image.transpose(0, 3, 1, 2))])[0]
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=THREADS)
    interpreter.allocate_tensors()
    (image_details,), (logits_details,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(image: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(image_details["index"], image)
        interpreter.invoke()
        return interpreter.get_tensor(logits_details["index"])

    return run


def time_files(folder: Path, rounds: int) -> dict[str, Any]:
    """Run all files of a model alternately; return the milliseconds of each round and the errors of the logits."""
    images, expected = np.load(folder / "images.npy"), np.load(folder / "logits.npy").astype(np.float64)
    suffixes = (".tflite", *SUFFIXES.values())
    runners = {path.name: runner(path) for path in sorted(folder.iterdir()) if path.suffix in suffixes}
    files: dict[str, dict[str, Any]] = {}
    for name, run in runners.items():
        logits = np.concatenate([run(image[None]) for image in images]).astype(np.float64)
        norms = np.linalg.norm(logits, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = float(((logits * expected).sum(axis=1) / norms).min())
        error = float(np.abs(logits - expected).max() / np.abs(expected).max())
        parts = [folder / name, (folder / name).with_suffix(".bin")]  # OpenVINO's weights
        size = sum(path.stat().st_size for path in parts if path.exists())
        files[name] = {"cosine": cosine, "error": error, "bytes": size, "ms": []}
    order, image, others = random.Random(0), images[:1], []

    def turns() -> None:
        for name in order.sample(list(runners), len(runners)):
            runners[name](image)
            ends = [time.perf_counter()]
            for _ in range(REPEATS):
                runners[name](image)
                ends.append(time.perf_counter())
            files[name]["ms"].append(1000 * statistics.median(np.diff(ends)))

    for _ in range(rounds):
        _, figures = measured(turns)
        others.append(figures["others"])
    installed = versions("ai-edge-litert", ONNX, OPENVINO)
    return {"files": files, "others": statistics.median(others), "versions": installed}


def main() -> None:
    """Build one package's model and write its file, or time all files; print the figures as JSON."""
    step, *arguments = sys.argv[1:]
    if step == "time":
        figures = time_files(Path(arguments[0]), int(arguments[1]))
    else:
        mode, folder, target = arguments[0], Path(arguments[1]), Path(arguments[2])
        build, write = PEERS[step]
        model = build(folder)
        _, figures = measured(functools.partial(write, model, mode, target))
        installed = ENVIRONMENTS.get(step, RUNTIMES)
        figures["versions"] = versions(*(requirement.partition("==")[0] for requirement in installed))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
