"""The README is short, its examples run and print what it shows, and its tables are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import doc_blocks
import feature_table
import model_table
from keras_vit import converters, zoo
from keras_vit.converters.table import load_table
from model_weights import assert_same_bits, values
from places import ROOT
from tiny_models import built

README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = feature_table.PAGE.read_text(encoding="utf-8")
TABLE = FEATURES.split(feature_table.START)[1].split(feature_table.END)[0]
HEADER, _, *ROWS = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TABLE.splitlines()]
HEADER = HEADER[-len(feature_table.FORMATS) :]
CELLS = {(row[0], format): cell for row in ROWS for format, cell in zip(HEADER, row[1:], strict=True)}


def test_the_table_of_features_is_the_tables_of_formats() -> None:
    assert feature_table.rendered() == TABLE, "run python tests/support/feature_table.py"
    for format in HEADER:
        assert CELLS["read / written", format] == ("both" if load_table(format).writable else "read"), format


def test_the_made_up_format_works_from_any_path(tmp_path: Path) -> None:
    text = (ROOT / "converters" / "README.md").read_text(encoding="utf-8")
    acme = tmp_path / "formats of mine" / "acme.toml"
    acme.parent.mkdir()
    acme.write_text(doc_blocks.blocks(text, "toml")[0], encoding="utf-8")
    model = built(activation="gelu_erf", norm_epsilon=1e-5)
    path = converters.save(model, tmp_path / "model.safetensors", format=str(acme))
    again = converters.load(path, format=str(acme))
    assert_same_bits(values(again), values(model))
    assert again.config == model.config
    with pytest.raises(converters.CheckpointError, match="acme format has no place for registers"):
        converters.save(built(num_registers=1), tmp_path / "other.safetensors", format=str(acme))
    with pytest.raises(converters.CheckpointError, match="no format is known"):
        converters.load(path)
    save_file(load_file(path), path)  # as acme's own code would write it: its heads must be told
    with pytest.raises(converters.CheckpointError, match="num_heads"):
        converters.load(path, format=str(acme))
    assert_same_bits(values(converters.load(path, format=str(acme), config={"num_heads": 4})), values(model))


@pytest.mark.full
def test_the_python_of_the_readme_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo takes all 200 steps.
    quick = README.replace('"finetune-digits")', '"finetune-digits", steps=3, xla=False)')
    proof = """
maps = larger.attention_maps(larger.preprocess(images))
assert len(maps) == larger.config.num_layers and result.model.config.image_size == (48, 48)
"""
    printed = doc_blocks.run(quick, tmp_path, monkeypatch, after=proof)
    assert printed.count("SQNR") == 2
    for path in ("report.html", "runs/digits/model.keras", "digits.tflite", "models/digits/1/saved_model.pb"):
        assert (tmp_path / path).is_file()


def test_the_first_lines_print_what_is_shown_below_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((code, output),) = doc_blocks.shown_outputs(README)
    assert code == doc_blocks.first_lines() and "http" not in code
    assert len([line for line in code.splitlines() if line]) == 5
    assert doc_blocks.run(f"```python\n{code}```\n", tmp_path, monkeypatch) == output


def test_the_readme_is_short() -> None:
    before_reference, heading, _ = README.partition("\n# Reference\n")
    assert heading
    assert len(before_reference.split()) <= 800  # words, with its code
    assert len(doc_blocks.BLOCK.sub("", README).split()) <= 1400


def test_the_table_of_models_is_the_cards_and_the_results() -> None:
    table = README.split(model_table.START)[1].split(model_table.END)[0]
    assert model_table.rendered() == table, "run python tests/support/model_table.py"
    families = README.split(model_table.FAMILIES_START)[1].split(model_table.FAMILIES_END)[0]
    assert model_table.rendered_families() == families, "run python tests/support/model_table.py"


def test_the_remarks_below_the_table_of_models_are_measured() -> None:
    (row,) = [row for row in zoo.table("ViT-S/16") if row["weights"] == model_table.WEIGHTS]
    (hybrid,) = [row for row in zoo.table("R26+ViT-S/32") if row["weights"] == model_table.WEIGHTS]
    assert round(1 - hybrid["gflops"] / row["gflops"], 2) == 0.34  # "a third fewer operations"
    results = model_table.RESULTS.read_text(encoding="utf-8")
    at_384 = re.search(r"^B/16 at 384: .*?^dynamic int8.*?^keras_vit +([\d.]+)", results, re.MULTILINE | re.DOTALL)
    assert at_384 and f"at 384 px `ViT-B/16` takes {float(at_384[1]):.0f} ms" in README
    assert "AMD EPYC, 2 CPUs" in results and "two cores of an AMD EPYC" in README


# A row of the measurements: the results file, and in it the rows of ours and of the other with their first number.
MEASURED = {
    "ViT-B/16: official file to model": (
        *("load.txt", 1, "s"),
        *(r"^keras_vit\.zoo\.load, official npz +([\d.]+)", r"^zeromodels, its \.weights\.h5 +([\d.]+)"),
    ),
    "ViT-B/16: `dynamic` file, one image": (
        *("edge.txt", 1, "ms"),
        *(rf"^B/16: .*?^dynamic int8.*?^{name} +([\d.]+)" for name in ("keras_vit", "zeromodels")),
    ),
    "ViT-Ti/16: training step, batch 32": (
        *("train_step.txt", 1000, "s"),
        *(r"^keras_vit +([\d.]+)", r"^fit: jit_compile=True +([\d.]+)"),
    ),
}


def test_the_measurements_of_the_readme_are_in_the_results() -> None:
    for row, (file, divisor, unit, *patterns) in MEASURED.items():
        results = (ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8")
        found = [re.search(pattern, results, re.MULTILINE | re.DOTALL) for pattern in patterns]
        digits = 1 if unit == "ms" else 2
        ours, other = (f"{float(match[1]) / divisor:.{digits}f} {unit}" for match in found if match)
        (line,) = [line for line in README.splitlines() if line.startswith(f"| {row} |")]
        assert f"| {ours} | {other}, " in line and f"(benchmarks/results/{file})" in line
