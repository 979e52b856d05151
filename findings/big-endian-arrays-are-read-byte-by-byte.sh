#!/usr/bin/env bash
# Guess: an array of type '>f4' or '>u2' (FITS, NetCDF, old .npy files, DICOM frames) is converted or refused by
# every library that takes NumPy arrays.
# Fact: OpenCV 5.0.0 and ONNX Runtime 1.32.0 take the bytes as if they were little-endian, without a word: 100
# becomes 25600, or 7e-41. torch refuses such arrays; Pillow, tifffile and safetensors convert them.
# Why it matters: np.load and astronomy's readers return such arrays, their prints and means look right, and the
# model gets noise.
# Instead: array.astype(array.dtype.newbyteorder('=')) right after reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 opencv-python-headless==5.0.0.93 onnx==1.23.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import onnxruntime
import PIL
from onnx import TensorProto, helper
from PIL import Image

print("opencv", cv2.__version__, "onnxruntime", onnxruntime.__version__, "pillow", PIL.__version__)
values = np.arange(16).reshape(4, 4) * 100
for code in ("u2", "i2", "f4", "f8"):
    swapped = values.astype(">" + code)
    result = cv2.resize(swapped, (4, 4), interpolation=cv2.INTER_NEAREST)
    print(f"OpenCV, >{code}: second value {swapped[0, 1]} becomes {result[0, 1]}")
    assert not np.array_equal(result, values), f"OpenCV converts >{code} now"
    assert np.array_equal(cv2.resize(values.astype(code), (4, 4), interpolation=cv2.INTER_NEAREST), values)
graph = helper.make_graph(
    [helper.make_node("Identity", ["x"], ["y"])],
    "copy",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
session = onnxruntime.InferenceSession(model.SerializeToString())
result = session.run(None, {"x": values.astype(">f4")})[0]
print("ONNX Runtime, >f4: second value becomes", result[0, 1])
assert not np.array_equal(result, values), "ONNX Runtime converts now"
assert np.array_equal(session.run(None, {"x": values.astype("f4")})[0], values)
assert np.array_equal(np.asarray(Image.fromarray(values.astype(">u2"))), values)
PY
