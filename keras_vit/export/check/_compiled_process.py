"""Run a .tflite file by LiteRT's CompiledModel: the program of `compiled.run_compiled`, without keras_vit's imports."""

import functools
import json
import operator
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.compiled_model import CompiledModel, CpuOptions, GpuOptions, HardwareAccelerator, Options


def run(folder: Path, *, path: str, hardware: list[str], cpu: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    """Run a file on images.npy, write outputs.npz, and return the other values of a `CompiledRun`."""
    accelerators = functools.reduce(operator.or_, (HardwareAccelerator[name] for name in hardware))
    options = Options(accelerators, cpu_options=CpuOptions(**cpu), gpu_options=GpuOptions(**gpu))
    model = CompiledModel.from_file(path, options=options)
    key = model.get_signature_by_index(0)["key"]
    [(name, image)], tensors = model.get_input_tensor_details(key).items(), model.get_output_tensor_details(key)
    given = {name: model.create_input_buffer_by_name(key, name)}
    results = {output: model.create_output_buffer_by_name(key, output) for output in tensors}
    images, batch, times = np.load(folder / "images.npy", mmap_mode="r"), image["shape"][0], []
    outputs: dict[str, list[np.ndarray]] = {output: [] for output in tensors}
    for start in range(-batch, len(images), batch):  # the first batch twice: the first call prepares kernels
        indices = np.arange(max(start, 0), max(start, 0) + batch).clip(max=len(images) - 1)
        began = time.perf_counter()
        given[name].write(images[indices].astype(image["dtype"]))
        model.run_by_name(key, given, results)
        for output, tensor in tensors.items():
            values = results[output].read(int(np.prod(tensor["shape"])), np.dtype(tensor["dtype"]))
            outputs[output].append(values.reshape(tensor["shape"]))
        times.append(1000 * (time.perf_counter() - began) / batch)
    joined = {output: np.concatenate(parts[1:])[: len(images)] for output, parts in outputs.items()}
    np.savez(folder / "outputs.npz", allow_pickle=False, **joined)
    return {"milliseconds": statistics.median(times[1:]), "is_fully_accelerated": model.is_fully_accelerated()}


if __name__ == "__main__":
    work = Path(sys.argv[1])
    report = run(work, **json.loads((work / "run.json").read_text("utf-8")))
    (work / "report.json").write_text(json.dumps(report), "utf-8")
