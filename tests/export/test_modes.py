"""Quantization modes: the package's own, users' own files, and errors in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keras_vit.export.modes import DEVICES, Options, load_mode, mode_names
from package_source import imported_packages

TABLE = 'summary = "mine"\ndevices = "mine"\nleast_cosine = 0.9\nleast_agreement = 0.9\n'
RULE = '[[rules]]\noperators = ["FULLY_CONNECTED"]\nweights = 8\n'
# name: (bits of kernels, whether the quantizer works on the file, whether it needs images)
KINDS = {
    "none": ((32, 32), False, False),
    "float16": ((16, 16), False, False),
    "dynamic": ((8, 8), False, False),
    "int8": ((8, 8), True, True),
    "int16x8": ((8, 32), True, True),
    "int4": ((4, 8), False, True),
}
# Text of a file -> what its error says.
WRONG = {
    TABLE + "least_cosin = 1.0\n": "nearest is 'least_cosine'",
    TABLE.replace("summary", "#"): "lacks the key 'summary'",
    TABLE + 'storage = "float61"\n': "nearest is 'float16'",
    TABLE + 'tables = "int8"\n': "tables must be",
    TABLE + 'storage = "int8"\n' + RULE: "where there are rules",
    TABLE.replace("cosine = 0.9", "cosine = 99.0"): "least_cosine must be",
    TABLE + "least_difference_cosine = 99.0\n": "least_difference_cosine must be",
    TABLE.replace("ment = 0.9", "ment = 99"): "least_agreement must be",
    TABLE + RULE.replace("8", "5"): r"weights must be .*\[4, 8, 32\]. Received: 5",
    TABLE + RULE + "activations = 4\n": "activations must be",
    TABLE + RULE + 'method = "gptk"\n': "nearest is 'gptq'",
    TABLE + RULE.replace("8", "32") + "activations = 8\n": "no kernel multiplies",
    TABLE + RULE.replace('"FULLY_CONNECTED"', ""): "operators is empty",
    TABLE + RULE + "names = 'dense1$'\n": "write ';' instead",
    TABLE + RULE + 'names = "("\n': "not a regular expression",
    TABLE + RULE.replace("8", "4") + "block = 32\n": "no key 'block'",
    TABLE + RULE + 'method = "gptq"\n' + RULE + "activations = 8\n": "do not go together",
    TABLE + RULE.replace("FULLY_CONNECTED", "CONV_2D") + 'method = "gptq"\n': "'gptq' is for FULLY_CONNECTED",
    TABLE + RULE + "[search]\nnoise = 0\nshare = 0.1\n": "no key 'search'",
    TABLE + 'norms = "int8"\n': "norms must be",
    TABLE + "[smoothing]\nalpha = 5\nthreshold = 4\n": "alpha must be",
    TABLE + "[smoothing]\nalpha = 0.5\nthreshold = 0.5\n": "threshold must be",
    # All that is wrong is told at once.
    TABLE + RULE.replace("8", "5") + 'method = "x"\n': "weights must be .*method must be",
}


def test_what_the_modes_of_the_package_do() -> None:
    found = {}
    for name in mode_names():
        mode = load_mode(name)
        found[name] = (mode.kernel_bits, mode.uses_quantizer, mode.needs_calibration)
        assert mode.name == name and mode.summary and mode.devices and "\n" not in mode.summary
    assert found == KINDS and list(found) == sorted(KINDS)


# (device, options) -> (mode, patches), or what the error says.
CHOICES = {
    (None, ""): ("dynamic", "dense"),
    (None, "int8"): ("int8", "convolution"),
    ("cpu", ""): ("dynamic", "dense"),
    ("cpu", "int16x8"): ("int16x8", "convolution"),
    ("gpu", ""): ("float16", "dense"),
    ("gpu", "int8"): ("int8", "convolution"),
    ("npu", ""): ("float16", "convolution"),
    ("npu", "int16x8"): ("int16x8", "convolution"),
    ("gpu", "int4"): ("int4", "dense"),
    ("npu", "int4"): ("int4", "convolution"),
    ("gpu", "int16x8"): "quantize='int16x8' does not run with device='gpu'.*int16. Take .*'float16' or 'dynamic'",
}


@pytest.mark.parametrize(("device", "given"), CHOICES)
def test_a_device_chooses_mode_and_patches_or_refuses_what_it_cannot_run(device: Any, given: str) -> None:
    options, expected = Options(device=device, quantize=given or None), CHOICES[device, given]
    mode = load_mode(options.mode_name)
    problems, line = list(options.device_problems(mode)), options.device_line(mode)
    assert not list(options.problems())
    if isinstance(expected, str):
        assert len(problems) == 1 and re.search(expected, problems[0])
        return
    assert (mode.name, options.chosen_patches(mode)) == expected and not problems
    assert Options(device=device, quantize=given or None, patches="dense").chosen_patches(mode) == "dense"
    if device is None:
        assert line is None
    else:
        assert line and f"for {device}: {mode.name}" in line and ("(given" in line) == bool(given) and "\n" not in line
        assert DEVICES[device].why in line


def test_rules_for_the_last_third_of_the_blocks_have_their_numbers() -> None:
    attention = [f"block_{place}" for place in ("7/attention/out", "8/attention/out", "11/attention/value")]
    names = [*attention, "block_11/mlp/dense1", "block_16/attention/out"]
    for count, bits in ((12, [4, 8, 8, 4, 4]), (24, [4, 4, 4, 4, 8]), (2, [4, 4, 4, 4, 4])):
        mode = load_mode("int4").for_blocks(count)
        assert [mode.storage_of("FULLY_CONNECTED", name).bits for name in names] == bits
        assert (mode.kernel_bits, mode.needs_calibration) == ((4, 8), True)


def test_devices_and_batches_that_do_not_go_together_are_refused() -> None:
    assert "needs batch=1" in next(Options(device="gpu", batch=None).device_problems(load_mode("float16")))
    assert not list(Options(device="npu", batch=4).device_problems(load_mode("float16")))
    for wrong in ("tpu", ["gpu"]):
        options = Options(device=wrong)  # type: ignore[arg-type]
        assert "device must be" in next(options.problems()) and options.mode_name == "dynamic"


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(FileNotFoundError, match="mine.toml"):
        load_mode(path)
    path.write_text(TABLE + RULE + 'names = "mlp"\n' + RULE.replace("8", "4") + 'method = "gptq"\n', encoding="utf-8")
    read = load_mode(path)
    assert read.name == "mine"
    first, second = read.rules
    assert (first.names, first.weights, first.needs_calibration) == ("mlp", 8, False)
    assert (second.method, second.weights, second.needs_calibration) == ("gptq", 4, True)
    assert read.kernel_bits == (4, 32)  # no rule for convolutions


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text, message in WRONG.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_mode(path)
    with pytest.raises(ValueError, match=r"nearest is 'int\d"):
        load_mode("int5")


def test_modes_are_read_without_keras_and_the_quantizer() -> None:
    heavy = {"keras", "tensorflow", "ai_edge_litert", "litert_quantizer"}
    assert not imported_packages("export.modes") & heavy
