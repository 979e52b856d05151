"""Print the operators of LiteRT files with the types of their tensors, and which compilers for NPUs know them.

    python benchmarks/operators.py                                   int16x8 files of four models
    python benchmarks/operators.py FILE ...                          files
    python benchmarks/operators.py --models B/16 R26+S/32            int16x8 files of models with random weights
    python benchmarks/operators.py --models digits --modes int8 --kinds

A row counts the operators of one kind whose inputs and outputs have the same types; "const" is a constant, "/out" that
each output has a scale of its own. The last line counts the operators with floats on either side.

The compilers' lists are those of LiteRT's repository at f677457 (August 2026): Qualcomm's and MediaTek's as their
documents in litert/vendors state them, Intel's as its plugin in ai-edge-litert 2.3.0 applies it. A compiler that knows
an operator may still refuse its types or shapes: Qualcomm's and MediaTek's ask the vendor's library, which is not here.
"""

import argparse
import collections
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit import dense, zoo
from keras_vit.export import samples
from keras_vit.export.litert.builder import schema

# Kinds of operators that the writer uses and a compiler does not know.
LACKS: dict[str, set[str]] = {
    "Qualcomm": set(),
    "MediaTek": {"SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "EQUAL", "FLOOR", "ARG_MAX", "GATHER"},
    "Intel": {"SPACE_TO_DEPTH", "FLOOR"},
}
MAPS = "segmenter "  # what a model's name begins with; the rest is the head


def main() -> None:
    """Print a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--models", nargs="+", default=[], help="digits, an architecture or a name of the zoo")
    parser.add_argument("--modes", nargs="+", default=["int16x8"])
    parser.add_argument("--kinds", action="store_true", help="only the last line of each table")
    options = parser.parse_args()
    if not options.files and not options.models:
        options.models = ["digits", "Ti/16", "R26+S/32", f"{MAPS}dpt"]
    for path in options.files:
        report(str(path), path, summary=options.kinds)
    for name in options.models:
        model = made(name)
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.tflite"
                images = samples.images(model.config, 2)
                least: dict[str, Any] = {"least_cosine": -1, "least_agreement": 0}
                keras_vit.export.tflite(model, path, quantize=mode, calibration=images, verify=images[:1], **least)
                report(f"{name}, {mode}", path, summary=options.kinds)


def made(name: str) -> Any:
    """Return a model; weights are random but for the digits'."""
    if name == "digits":
        return zoo.load(name)
    keras.utils.set_random_seed(0)
    if name.startswith(MAPS):
        config = keras_vit.ViTConfig.from_name("Ti/16", num_classes=0)
        return dense.segmenter(keras_vit.VisionTransformer(config), 20, head=name.removeprefix(MAPS))
    try:
        model = keras_vit.VisionTransformer(keras_vit.ViTConfig.from_name(name))
    except ValueError:
        model = zoo.load(name, weights=None)
    random = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(variable + 0.02 * random.standard_normal(variable.shape))
    return model


def report(label: str, path: Path, *, summary: bool) -> None:
    """Print the table of a file."""
    rows = operators(path)
    total, floats = sum(rows.values()), sum(count for row, count in rows.items() if "float32" in "".join(row[1:]))
    inside = sorted({row[0] for row in rows if "float32" in "".join(row[1:])} - {"QUANTIZE", "DEQUANTIZE"})
    if not summary:
        print(f"# {label}")
        for (kind, inputs, outputs), count in sorted(rows.items()):
            unknown = ", ".join(name for name, kinds in LACKS.items() if kind in kinds)
            print(f"{count:5} {kind:20} {inputs:36} -> {outputs:8} {unknown and f'not {unknown}'}".rstrip())
    known = (sum(count for row, count in rows.items() if row[0] not in kinds) for kinds in LACKS.values())
    counts = ", ".join(f"{name} {count}" for name, count in zip(LACKS, known, strict=True))
    print(f"{label}: {total} operators; known to {counts}; {floats} with floats ({', '.join(inside) or 'none inside'})")


def operators(path: Path) -> collections.Counter[tuple[str, str, str]]:
    """Count the operators of a file by their kind and the types of their inputs and outputs."""
    s = schema()
    names, types = ({number: name for name, number in vars(kind).items()} for kind in (s.BuiltinOperator, s.TensorType))
    model = s.ModelT.InitFromObj(s.Model.GetRootAs(path.read_bytes()))
    [graph] = model.subgraphs

    def described(index: int) -> str:
        tensor = graph.tensors[index]
        scales = None if tensor.quantization is None else tensor.quantization.scale
        by_output = "/out" if scales is not None and len(scales) > 1 else ""
        buffer = model.buffers[tensor.buffer]
        is_constant = buffer.offset or buffer.data is not None and len(buffer.data)
        return f"{types[tensor.type].lower()}{by_output}{' const' if is_constant else ''}"

    rows: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for row in graph.operators:
        inputs, outputs = (", ".join(described(i) for i in side if i >= 0) for side in (row.inputs, row.outputs))
        rows[names[model.operatorCodes[row.opcodeIndex].builtinCode], inputs, outputs] += 1
    return rows


if __name__ == "__main__":
    main()
