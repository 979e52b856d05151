"""Embed photos with timm and PyTorch, ONNX Runtime or OpenVINO, each in the fastest way on a CPU that was found.

    python embed_peers.py prepare FOLDER PHOTOS          write the peers' files; file_models.py runs this script
    python embed_peers.py WAY FOLDER PHOTOS VECTORS

FOLDER has model.safetensors in timm's names, and model.json: timm's name, mean, std and size before the crop. VECTORS
gets vectors.npy. PyTorch: bfloat16 weights; on each processor a thread with batches of 16 and a DataLoader with a
worker, in half of the processor time of a thread pool for each batch, and faster than torch.compile. ONNX Runtime and
OpenVINO: an image on each processor; OpenVINO normalizes in its graph. This script does not import keras_vit.
"""

import importlib
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CPUS = os.cpu_count() or 1
SIZE = 224
CALIBRATION = 32  # photos
SUPPORT = Path(__file__).parents[1] / "tests" / "support"


def pixels(path: Path, before_crop: int) -> np.ndarray:
    """Decode, resize and crop a photo as timm does: uint8 (height, width, 3)."""
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    short = min(image.size)
    image = image.resize([side * before_crop // short for side in image.size], Image.Resampling.BICUBIC)
    left, top = ((side - SIZE) // 2 for side in image.size)
    return np.asarray(image.crop((left, top, left + SIZE, top + SIZE)))


def timm_model(folder: Path, facts: dict[str, Any]) -> Any:
    """Create timm's model with the weights of the folder. A torchvision of another build than torch is left out."""
    from safetensors.torch import load_file

    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.path.insert(0, str(SUPPORT))
        sys.meta_path.insert(0, importlib.import_module("torch_peers")._StandIn())
    import timm

    model = timm.create_model(facts["name"], img_size=SIZE, num_classes=0)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def prepare(folder: Path, photos: list[Path], facts: dict[str, Any]) -> None:
    """Write the ONNX graph and the quantized files."""
    import nncf
    import onnx
    import openvino
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path, names = folder / "model.onnx", {"input_names": ["image"], "output_names": ["features"]}
    shapes = {"x": {0: torch.export.Dim("batch")}}
    images = (torch.zeros(2, 3, SIZE, SIZE),)
    torch.onnx.export(
        timm_model(folder, facts), images, path, **names, dynamo=True, dynamic_shapes=shapes, external_data=False
    )
    graph = onnx.load(path)
    del graph.graph.value_info[:]  # has shapes of before weights were transposed, which the quantizer refuses
    kinds = {"op_types_to_quantize": ["MatMul", "Gemm"], "weight_type": QuantType.QInt8}
    quantize_dynamic(graph, folder / "dynamic.onnx", per_channel=True, **kinds)
    model = openvino.Core().read_model(path)
    model.reshape([1, 3, SIZE, SIZE])
    some = [normalized(pixels(photo, facts["before_crop"]), facts) for photo in photos[:: len(photos) // CALIBRATION]]
    model = nncf.quantize(model, nncf.Dataset(some), model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(model, folder / "int8.xml")


def normalized(image: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
    """Normalize pixels for PyTorch: float32 (1, 3, height, width)."""
    mean, std = (np.array(facts[name], np.float32) * 255 for name in ("mean", "std"))
    return ((image - mean) / std).transpose(2, 0, 1)[None]


def pytorch(folder: Path, photos: list[Path], facts: dict[str, Any]) -> np.ndarray:
    """Embed by timm's model."""
    import torch
    from torch.utils.data import DataLoader

    class Photos(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(photos)

        def __getitem__(self, number: int) -> Any:
            return torch.from_numpy(normalized(pixels(photos[number], facts["before_crop"]), facts)[0])

    torch.set_num_threads(1)
    model = timm_model(folder, facts).to(torch.bfloat16)

    def embed(places: list[int]) -> Any:
        with torch.inference_mode():
            loader = DataLoader(torch.utils.data.Subset(Photos(), places), batch_size=16, num_workers=1)
            return torch.cat([model(images.to(torch.bfloat16)).float() for images in loader])

    shares = np.array_split(np.arange(len(photos)), CPUS)
    with ThreadPoolExecutor(CPUS) as pool:
        return np.concatenate(list(pool.map(embed, [share.tolist() for share in shares])))


def onnxruntime(folder: Path, photos: list[Path], facts: dict[str, Any]) -> np.ndarray:
    """Embed by the graph whose products of matrices are quantized."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "dynamic.onnx", options)

    def embed(photo: Path) -> np.ndarray:
        return session.run(None, {"image": normalized(pixels(photo, facts["before_crop"]), facts)})[0]

    with ThreadPoolExecutor(CPUS) as pool:
        return np.concatenate(list(pool.map(embed, photos)))


def openvino(folder: Path, photos: list[Path], facts: dict[str, Any], *, is_int8: bool) -> np.ndarray:
    """Embed by the graph in bfloat16, or by the quantized one."""
    import openvino
    from openvino.preprocess import PrePostProcessor

    core = openvino.Core()
    model = core.read_model(folder / ("int8.xml" if is_int8 else "model.onnx"))
    model.reshape([1, 3, SIZE, SIZE])
    steps = PrePostProcessor(model)
    steps.input().tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    mean, std = ([255 * value for value in facts[name]] for name in ("mean", "std"))
    steps.input().preprocess().convert_element_type(openvino.Type.f32).mean(mean).scale(std)
    steps.input().model().set_layout(openvino.Layout("NCHW"))
    settings = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": CPUS, "INFERENCE_NUM_THREADS": CPUS}
    queue = openvino.AsyncInferQueue(
        core.compile_model(steps.build(), "CPU", settings | {"INFERENCE_PRECISION_HINT": "bf16"}), CPUS
    )
    vectors: dict[int, np.ndarray] = {}
    queue.set_callback(lambda request, number: vectors.update({number: request.get_output_tensor().data.copy()}))
    with ThreadPoolExecutor(CPUS) as pool:
        for number, image in enumerate(pool.map(lambda photo: pixels(photo, facts["before_crop"]), photos)):
            queue.start_async(image[None], number)
    queue.wait_all()
    return np.concatenate([vectors[number] for number in range(len(photos))])


def main() -> None:
    """Prepare, or embed in one way."""
    way, folder, photos = sys.argv[1], Path(sys.argv[2]), sorted(Path(sys.argv[3]).glob("*.jpg"))
    facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    if way == "prepare":
        prepare(folder, photos, facts)
        return
    if way.startswith("openvino"):
        vectors = openvino(folder, photos, facts, is_int8=way == "openvino-int8")
    else:
        vectors = {"pytorch": pytorch, "onnxruntime": onnxruntime}[way](folder, photos, facts)
    target = Path(sys.argv[4])
    target.mkdir(parents=True)
    np.save(target / "vectors.npy", vectors)


if __name__ == "__main__":
    main()
