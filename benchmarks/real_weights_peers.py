"""Run the ONNX graph of the trained model in OpenVINO and ONNX Runtime, quantized by their own tools.

    python real_weights_peers.py GRAPH FOLDER      run by real_weights.py with the interpreter of the peers' environment

FOLDER has images.npz; it gets a NAME.peer.npz for each peer. This script does not import keras_vit.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 10
Run = Callable[[np.ndarray], np.ndarray]  # one image -> class token


def onnxruntime_run(path: Path) -> Run:
    """Return a function that runs an ONNX file on two threads, which do not spin between calls."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options)
    return lambda image: session.run(["cls"], {"input_image": image})[0]


def onnxruntime_dynamic(path: Path, folder: Path) -> Run:
    """Quantize matrix products with a scale for each output channel, inputs at run time."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path)
    del graph.graph.value_info[:]  # has old shapes of transposed weights, which the quantizer refuses
    target = folder / "dynamic.onnx"
    products = {"op_types_to_quantize": ["MatMul", "Gemm"], "weight_type": QuantType.QInt8}
    quantize_dynamic(graph, target, per_channel=True, **products)
    return onnxruntime_run(target)


def openvino_run(model: Any) -> Run:
    """Return a function that runs an OpenVINO model on two threads in float32 where it is not quantized."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(model, "CPU", settings)
    return lambda image: np.asarray(compiled(image)["cls"])


def openvino_model(path: Path) -> Any:
    """Read the graph for one image."""
    import openvino

    model = openvino.Core().read_model(path)
    model.reshape([1, 3, 224, 224])
    return model


def openvino_int8(path: Path, calibration: np.ndarray) -> Any:
    """Quantize by NNCF, its way for a Transformer."""
    import nncf

    data = nncf.Dataset([image[None] for image in calibration])
    return nncf.quantize(openvino_model(path), data, model_type=nncf.ModelType.TRANSFORMER)


def main() -> None:
    """Write what each peer computes."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    images = {name: x.transpose(0, 3, 1, 2) for name, x in np.load(folder / "images.npz").items()}
    calibration = images.pop("calibration")
    peers: dict[str, Run] = {
        "ONNX Runtime float32": onnxruntime_run(path),
        "ONNX Runtime dynamic": onnxruntime_dynamic(path, folder),
        "OpenVINO float32": openvino_run(openvino_model(path)),
        "OpenVINO int8": openvino_run(openvino_int8(path, calibration)),
    }
    for name, run in peers.items():
        received = {key: np.concatenate([run(one[None]) for one in x]) for key, x in images.items()}
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            run(images["set0"][:1])
            times.append(1000 * (time.perf_counter() - start))
        np.savez(folder / f"{name}.peer.npz", milliseconds=statistics.median(times), **received)


if __name__ == "__main__":
    main()
