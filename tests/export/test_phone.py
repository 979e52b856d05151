"""What a phone computed is compared with the model: images for it, logs of LiteRT's programs, calls of the script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keras_vit import VisionTransformer, digits, export, zoo
from keras_vit.errors import VerificationError
from keras_vit.export.exported import load_exported
from keras_vit.export.phone import Accelerated
from places import ROOT

pytest.importorskip("ai_edge_litert")

SCRIPT = ROOT / "examples" / "android" / "check.sh"
PREFIX = "I0000 00:00:1755843000.123456   17028 tensor_utils.h:138] "
# What LiteRT's programs log of the operators that each accelerator takes.
CPU = "INFO: Replacing 130 out of 132 node(s) with delegate (TfLiteXNNPackDelegate) node, yielding 3 partitions for ..."
TAKEN = {
    "cpu": (CPU, Accelerated("cpu", 130, 132, "unknown")),
    "gpu": (CPU.replace("130", "132").replace("TfLiteXNNPack", "LITERT_CL"), Accelerated("gpu", 132, 132)),
    "npu": (
        "INFO: Partitioned subgraph<0>, selected 131 ops, from a total of 132 ops. resulted in 2 partitions.\n"
        + CPU.replace("130 out of 132", "2 out of 3").replace("TfLiteXNNPack", "Dispatch"),
        Accelerated("npu", 131, 132, "unknown"),
    ),
}
BENCHMARK = "INFO: Inference (avg):      12.34 ms (50 runs)\nexit status 0\n"


def log(outputs: dict[str, np.ndarray], operators: str) -> str:
    """Write outputs as run_model's log has them, after litert/tools/run_model.cc and tensor_utils.h."""
    lines = [operators, f"{PREFIX}Prepare output buffers"]
    for number, values in enumerate(outputs.values()):
        sizes = [PREFIX + f"    {side}" for side in values.shape]
        lines += [f"{PREFIX}Output buffer {number}:", f"{PREFIX}  Size: {values.nbytes} bytes", *sizes]
        lines += [f"{PREFIX}  Total logical elements: {values.size}", f"{PREFIX}  Stats:", f"{PREFIX}    Min: -1.5"]
        lines += [f"{PREFIX}  Beginning {values.size} elements:"]
        lines += [f"{PREFIX}    {index}: {value:.6g}" for index, value in enumerate(values.ravel())]
    return "\n".join([*lines, f"{PREFIX}Model run completed", "exit status 0", ""])


def compute(path: Path, folder: Path, accelerator: str) -> None:
    """Compute outputs with the desktop's runtime in the phone's place, and write its logs."""
    file, logs = load_exported(path), folder / accelerator
    logs.mkdir()
    for raw in sorted(folder.glob("inputs/*/image.raw")):
        outputs = file.call(np.fromfile(raw, file.dtype).reshape(1, *file.shape))
        (logs / f"{raw.parent.name}.log").write_text(log(outputs, TAKEN[accelerator][0]))
    (logs / "benchmark.log").write_text(BENCHMARK)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionTransformer, Path, Path]:
    """Return the digits model, its file, and a folder with the images for a phone and what it computed of them."""
    model, folder = zoo.load("digits"), tmp_path_factory.mktemp("phone")
    path = folder / "digits.tflite"
    export.tflite(model, path, device="gpu")
    export.verify(model, path, digits.load().test_images[:3], inputs=folder)
    for accelerator in TAKEN:
        compute(path, folder, accelerator)
    (folder / "device.txt").write_text("Google Pixel 9\nGoogle Tensor G4, Android 16\nLiteRT of litert-2.3.0\n")
    return model, path, folder


@pytest.mark.parametrize("accelerator", TAKEN)
def test_outputs_of_a_phone_are_compared_with_the_models(
    accelerator: str, written: tuple[VisionTransformer, Path, Path]
) -> None:
    model, path, folder = written
    assert [place.name for place in sorted((folder / "inputs").iterdir())] == ["0000", "0001", "0002"]
    report = export.verify(model, path, outputs=folder, accelerator=accelerator)
    assert (report.images, report.milliseconds, report.agreement) == (3, 12.34, 1.0)
    assert report.cosine is not None and report.cosine > 0.99999 and report.accelerated == TAKEN[accelerator][1]
    text = str(report)
    assert "Google Pixel 9; Google Tensor G4, Android 16; LiteRT of litert-2.3.0" in text and "12.34 ms" in text


@pytest.mark.full
def test_pixels_and_attention_are_compared_too(written: tuple[VisionTransformer, Path, Path], tmp_path: Path) -> None:
    model, path = written[0], tmp_path / "pixels.tflite"
    export.tflite(model, path, input_dtype="uint8", source_size=(20, 24), attention=True)
    export.verify(model, path, digits.load().test_images[:2], inputs=tmp_path)
    compute(path, tmp_path, "npu")
    report = export.verify(model, path, outputs=tmp_path, accelerator="npu")
    assert report.cosine is not None and report.cosine > 0.999 and report.device == "a device without a name"
    # Nothing is said of the NPU: the CPU may have run it.
    for place in (tmp_path / "npu").iterdir():
        place.write_text(place.read_text().replace("selected", "").replace("Dispatch", "XNN"))
    accelerated = export.verify(model, path, outputs=tmp_path, accelerator="npu").accelerated
    assert accelerated is not None and accelerated.taken == 0 < accelerated.of and "no log" in str(accelerated)


# Name of a log -> what becomes of its text, and what the error says.
BROKEN = {
    "0001.log": (None, "there is no .*0001.log; .*check.sh"),
    "0002.log": (
        ("exit status 0", "exit status 134"),
        "0002.log: the program failed .*exit status 134.*Model run compl",
    ),
    "benchmark.log": (("(avg)", ""), "benchmark.log has no line 'Inference"),
}
VALUES = {
    "    9: ": ("", "has 9 values of an output of 10. Expected: {'logits': 10}"),
    "elements: 10": ("elements: 11", "has 10 values of an output of 11"),
    "Output buffer 0": ("Output buffer", "has the outputs .*Expected: {'logits': 10}"),
    "exit status 0": ("", "failed on the phone .exit status not known"),
}


@pytest.mark.parametrize("case", [*BROKEN, *VALUES, "nan", "raw", "no images"])
def test_what_is_missing_or_wrong_is_one_error(
    case: str, written: tuple[VisionTransformer, Path, Path], tmp_path: Path
) -> None:
    model, path, complete = written
    folder = tmp_path / "phone"
    shutil.copytree(complete, folder)
    place, error = folder / "cpu" / "0001.log", ValueError
    if case in BROKEN:
        change, message = BROKEN[case]
        place = folder / "cpu" / case
        place.unlink() if change is None else place.write_text(place.read_text().replace(*change))
    elif case in VALUES:
        new, message = VALUES[case]
        place.write_text(place.read_text().replace(case, new))
    elif case == "nan":
        error, message = VerificationError, "computes NaN or infinity"  # type: ignore[assignment]
        place.write_text(re.sub(r"( 3: )\S+", r"\1nan", place.read_text()))
    elif case == "raw":
        message = "image.raw is for another file: it has 12 bytes"
        (folder / "inputs" / "0001" / "image.raw").write_bytes(b"0" * 12)
    else:
        message = "there are no images in .*inputs; .*check.sh"
        shutil.rmtree(folder / "inputs")
    with pytest.raises(error, match=message):
        export.verify(model, path, outputs=folder)


def test_folders_that_do_not_fit_are_refused(written: tuple[VisionTransformer, Path, Path], tmp_path: Path) -> None:
    model, path, folder = written
    with pytest.raises(ValueError, match="inputs exists. Choose another"):
        export.verify(model, path, inputs=folder)
    with pytest.raises(ValueError, match="Received: images or inputs"):
        export.verify(model, path, digits.load().test_images[:1], outputs=folder)
    with pytest.raises(ValueError, match="is for the outputs= of a phone. Received: 'npu'"):
        export.verify(model, path, accelerator="npu")
    with pytest.raises(ValueError, match="accelerator must be one of .*'npu'.*Received: 'tpu'"):
        export.verify(model, path, outputs=folder, accelerator="tpu")
    export.tflite(model, tmp_path / "two.tflite", batch=2)
    with pytest.raises(ValueError, match=r"batch 1. Received: \(2, "):
        export.verify(model, tmp_path / "two.tflite", inputs=tmp_path / "phone")


# LiteRT's programs, which give what the desktop's runtime computed; the NPU's fails.
BENCHMARK_MODEL = """#!/bin/sh
echo 'Inference (avg): 2.5 ms'
"""
RUN_MODEL = """#!/bin/sh
echo '] Input buffer 0:'; echo ']   0: 7'; echo '] Prepare output buffers'
for each; do case $each in --accelerator=*) kind=${each#*=};; --input_dir=*) image=${each##*/};; esac; done
grep -v '^exit status' "$COMPUTED/$kind/$image.log"
[ $kind != npu ] || exit 134
"""
# Runs here what is for the phone, in another folder, and notes each call.
ADB = """#!/bin/sh
echo "$1" >>"$CALLS"
here() { echo "$1" | sed "s,/data/local/tmp/keras_vit,$PHONE,g"; }
case "$1 $2" in
    push*) cp -r "$2" "$(here "$3")" ;;
    pull*) cp -r "$(here "$2")" "$3" ;;
    *getprop*) echo "${2##*.}" ;;
    shell*) sh -c "$(here "$2")" ;;
esac
"""
KERAS_VIT = f"""#!/bin/sh
exec {sys.executable} -m keras_vit "$@"
"""


@pytest.mark.full
def test_the_script_runs_each_accelerator_and_compares(
    written: tuple[VisionTransformer, Path, Path], tmp_path: Path
) -> None:
    _, path, computed = written
    programs = {"litert-2.3.0/benchmark_model": BENCHMARK_MODEL, "litert-2.3.0/run_model": RUN_MODEL}
    for name, text in (programs | {"tools/adb": ADB, "tools/keras-vit": KERAS_VIT}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    Image.fromarray(digits.load().test_images[0].squeeze()).save(tmp_path / "image.png")
    variables = {name: str(tmp_path / name.lower()) for name in ("CALLS", "PHONE", "OUT")}
    variables |= {"LITERT": str(tmp_path / "litert-2.3.0"), "COMPUTED": str(computed)}
    variables["PATH"] = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    command = ["sh", str(SCRIPT), str(path), "digits", "image.png"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # the NPU's
    assert "manufacturer model; manufacturer model, Android release; LiteRT of litert-2.3.0, run_model" in done.stdout
    assert "130 of 132 operators on the cpu" in done.stdout and "132 of 132 operators on the gpu" in done.stdout
    assert "2.50 ms" in done.stdout and "the program failed on the phone (exit status 134)" in done.stderr
    assert "Input buffer" not in (tmp_path / "out" / "gpu" / "0000.log").read_text()
    assert not (tmp_path / "phone").exists()
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("pull") == 3 and calls.count("push") == 4
    without = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert without.returncode != 0 and "LITERT: is the folder of the programs" in without.stderr
