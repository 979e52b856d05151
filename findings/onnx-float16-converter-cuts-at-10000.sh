#!/usr/bin/env bash
# Guess: converting an ONNX model to float16 changes numbers beyond 65504 to infinity and the smallest to 0, and
# rounds the others.
# Fact: convert_float_to_float16 of onnxconverter-common 1.16.0 cuts at 10,000 (20,000 becomes 10,000) and lifts
# small numbers: 1e-9 and 3e-8 become 1.2e-7, where rounding gives 0 and 6e-8. The limits are its options
# max_finite_val and min_positive_val.
# Why it matters: an epsilon of 1e-12 becomes 1e-7, sparse weights stop being sparse, and position or pixel
# constants above 10,000 are wrong, where one looks for overflow only.
# Instead: max_finite_val=65504 and min_positive_val=6e-8, and compare the outputs of both models.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 onnx==1.23.2 onnxconverter-common==1.16.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common import float16

print("onnxconverter-common", version("onnxconverter-common"), "onnx", version("onnx"))
values = np.array([[20000, 65000, 1e-9, -1e-9, 3e-8, 1e-5, 0]], np.float32)


def converted(**options):
    size = list(values.shape)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "add",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, size)],
        [numpy_helper.from_array(values, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    half = float16.convert_float_to_float16(model, **options)
    return numpy_helper.to_array(half.graph.initializer[0]).astype(np.float64)[0]


default, plain = converted(), values[0].astype(np.float16).astype(np.float64)
for before, after, rounded in zip(values[0], default, plain, strict=True):
    print(f"{before:g} becomes {after:g}, plain rounding gives {rounded:g}")
assert default[0] == default[1] == 10000, "the upper limit is another one now"
assert 0.9e-7 < default[2] < 1.3e-7 and -1.3e-7 < default[3] < -0.9e-7, "the lower limit is another one now"
assert plain[0] == 20000 and plain[2] == 0
assert converted(max_finite_val=65504)[0] == 20000
PY
