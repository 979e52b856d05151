"""Quantization modes: the package's own, users' own files, and errors in them."""

from pathlib import Path

import pytest

from keras_vit.export.modes import load_mode, mode_names
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
WRONG = {
    "an unknown key": (TABLE + "least_cosin = 1.0\n", "no key 'least_cosin'; the nearest is 'least_cosine'"),
    "a missing key": (TABLE.replace("summary", "#"), "lacks the key 'summary'"),
    "an unknown storage": (TABLE + 'storage = "float61"\n', "the nearest is 'float16'"),
    "an unknown storage of tables": (TABLE + 'tables = "int8"\n', "tables must be one of .*float16"),
    "rules after int8": (TABLE + 'storage = "int8"\n' + RULE, "where there are rules"),
    "a cosine above 1": (
        TABLE.replace("cosine = 0.9", "cosine = 99.0"),
        r"least_cosine must be in \[-1, 1\]. Received: 99.0",
    ),
    "a cosine of differences above 1": (
        TABLE + "least_difference_cosine = 99.0\n",
        r"least_difference_cosine must be in \[-1, 1\]. Received: 99.0",
    ),
    "an agreement in per cent": (TABLE.replace("ment = 0.9", "ment = 99"), r"least_agreement must be in \[0, 1\]"),
    "odd bits": (TABLE + RULE.replace("8", "5"), r"weights must be one of \[4, 8, 32\]. Received: 5"),
    "activations of 4 bits": (TABLE + RULE + "activations = 4\n", r"activations must be one of \[8, 16, 32\]"),
    "an unknown method": (TABLE + RULE + 'method = "gptk"\n', "the nearest is 'gptq'"),
    "float weights, integer inputs": (TABLE + RULE.replace("8", "32") + "activations = 8\n", "no kernel multiplies"),
    "no operators": (TABLE + RULE.replace('"FULLY_CONNECTED"', ""), "operators is empty"),
    "an expression that ends a name": (TABLE + RULE + "names = 'dense1$'\n", r"must not have '\$'.*write ';' instead"),
    "blocks of 8 bits": (TABLE + RULE + "block = 32\n", "block is for weights of 4 bits. Received: 8"),
    "odd blocks": (TABLE + RULE.replace("8", "4") + "block = 48\n", r"block must be one of \[32, 64, 128, 256\]"),
    "GPTQ of activations": (
        TABLE + RULE + 'method = "gptq"\n' + RULE + "activations = 8\n",
        "do not go together",
    ),
    "a search": (TABLE + RULE + "[search]\nnoise = 0\nshare = 0.1\n", "no key 'search'"),
    "norms of 8 bits": (TABLE + 'norms = "int8"\n', "norms must be one of .*int16"),
    "GPTQ of a convolution": (
        TABLE + RULE.replace("FULLY_CONNECTED", "CONV_2D") + 'method = "gptq"\n',
        r"'gptq' is for FULLY_CONNECTED. Received: \['CONV_2D'\]",
    ),
    "no expression": (TABLE + RULE + 'names = "("\n', "not a regular expression"),
    "a strange alpha": (TABLE + "[smoothing]\nalpha = 5\nthreshold = 4\n", r"alpha must be in \[0, 1\]. Received: 5"),
    "a threshold below 1": (TABLE + "[smoothing]\nalpha = 0.5\nthreshold = 0.5\n", r"threshold must be in \[1, inf\)"),
}


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_package_has_these_modes():
    assert mode_names() == sorted(KINDS)


@pytest.mark.parametrize(("name", "expected"), KINDS.items())
def test_what_a_mode_of_the_package_does(name, expected):
    read = load_mode(name)
    assert (read.bits, read.uses_quantizer, read.needs_calibration) == expected
    assert read.name == name and read.summary and read.devices
    assert "\n" not in read.summary


def test_a_file_of_ones_own_is_read(written):
    read = load_mode(written(TABLE + RULE + 'names = "mlp"\n' + RULE.replace("8", "4") + 'method = "gptq"\n'))
    assert read.name == "mine"
    first, second = read.rules
    assert (first.names, first.weights, first.needs_calibration) == ("mlp", 8, False)
    assert (second.method, second.weights, second.needs_calibration) == ("gptq", 4, True)
    assert read.bits == (4, 32)  # no rule for convolutions


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ValueError, match=r"quantize must be one of .*Received: 'int5'; the nearest is 'int\d"):
        load_mode("int5")


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file .*mine.toml"):
        load_mode(tmp_path / "mine.toml")


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(written, text, message):
    with pytest.raises(ValueError, match=message):
        load_mode(written(text))


def test_all_that_is_wrong_is_told_at_once(written):
    with pytest.raises(ValueError, match=r"weights must be one of .*method must be one of"):
        load_mode(written(TABLE + RULE.replace("8", "5") + 'method = "x"\n'))


def test_modes_are_read_without_keras_and_the_quantizer():
    assert not imported_packages("export.modes") & {
        "keras",
        "tensorflow",
        "ai_edge_litert",
        "ai_edge_quantizer",
    }
