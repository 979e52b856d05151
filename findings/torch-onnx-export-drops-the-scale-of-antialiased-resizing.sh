#!/usr/bin/env bash
# Guess: a model that torch.onnx.export converts without a word resizes its position embeddings as PyTorch does.
# Fact: with antialias=True and a scale_factor, PyTorch 2.14.1 samples by the scale given, while the exported Resize
# uses the ratio of the sizes. At (16 + 0.1) / 37, as DINOv2's code asks for to get the size right, they differ by
# several percent. With size=, or without antialias, they agree to 1e-5.
# Why it matters: position embeddings or pictures that a model resizes inside are shifted in the ONNX file alone, and
# the features drift.
# Instead: interpolate(size=...) before the export, or resize the position embeddings first and export a fixed size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import onnxruntime
import torch

print("torch", torch.__version__, "onnxruntime", onnxruntime.__version__)
torch.manual_seed(0)
positions = torch.rand(1, 8, 37, 37)
scale = (16 + 0.1) / 37


class Resize(torch.nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, x):
        return torch.nn.functional.interpolate(x, mode="bicubic", **self.arguments)


def exported(**arguments):
    model = Resize(**arguments).eval()
    torch.onnx.export(model, (positions,), "resize.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("resize.onnx")
    result = session.run(None, {session.get_inputs()[0].name: positions.numpy()})[0]
    return result, float(abs(result - model(positions).numpy()).max())


by_scale, wrong = exported(scale_factor=(scale, scale), antialias=True)
by_size, right = exported(size=(16, 16), antialias=True)
_, plain = exported(scale_factor=(scale, scale))
print(f"values of 0..1; error with antialias and scale {wrong:.3f}, with size {right:.1e}, without antialias {plain:.1e}")
assert right < 1e-4 and plain < 1e-4
assert wrong > 0.01, "the scale is exported now"
assert abs(by_scale - by_size).max() < 1e-6, "it is another error than that of the size now"
PY
