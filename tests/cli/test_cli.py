"""The commands list, show, predict, convert, resize and time models; their help, names and completion."""

from __future__ import annotations

import ast
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import reference_cases as reference
from command_line import fails, run
from keras_vit import __version__, cli, converters, zoo
from keras_vit._util import files
from keras_vit._util.progress import timed
from keras_vit.batch.folder import open_folder
from keras_vit.cli import demo, show
from keras_vit.zoo import cards, catalogue, pretrained
from official_counts import OFFICIAL
from package_source import ROOT, TREES

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = sorted(GROUP.commands)
TOKEN = reference.checkpoint("vit_token")
DIGITS = files.data_folder("zoo") / "weights" / "digits.npz"


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a zero that is not in scikit-learn's data: a white ring with a black hole."""
    path = tmp_path_factory.mktemp("pictures") / "zero.png"
    y, x = np.mgrid[:64, :64] - 31.5
    ring = np.abs(np.hypot(x / 0.75, y) - 22) < 5
    Image.fromarray((ring * 255).astype(np.uint8)).convert("RGB").save(path)
    return path


# ---- help and usage


def test_every_command_explains_itself_and_each_of_its_options() -> None:
    overview = run("--help")
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", overview)
        assert len(run(command, "--help").splitlines()) > 5
        known = GROUP.commands[command]
        assert known.help, command
        assert not [each.name for each in known.params if not getattr(each, "help", None)], command
    assert run("--version").strip() == __version__


def test_what_is_no_command_and_no_option_is_a_usage_error() -> None:
    lines = [[command, "--no-such-option"] for command in COMMANDS]
    lines += [["lst"], ["show"], ["predict", "digits"], ["evaluate", "digits"]]
    for line in lines:
        result = CliRunner().invoke(cli.app, line)
        assert (result.exit_code, result.stdout) == (2, ""), line
        assert "Usage:" in result.stderr
    assert "--data" in result.stderr  # what the last line lacks


# ---- list and show


def test_list_has_every_model_and_its_weights() -> None:
    families = run("list", "--all").split("\n\n")
    assert [family.partition("-")[0] for family in families][1:4] == ["AIMv2", "BEiT", "BEiT3"]
    lines = "\n".join(families).splitlines()
    assert [line.split()[0] for line in lines] == catalogue.names()
    line = next(line for line in lines if line.startswith("ViT-B/16"))
    assert re.search(r" 86.9 M +384 px +85.49 % +Apache-2.0 +augreg-imagenet21k\+imagenet2012, ", line)
    short = run("list")  # every family in few lines
    assert len(short.splitlines()) <= 45 and all(
        f"  {card.family} " in short for card in map(cards.card, catalogue.names())
    )
    # A line counts the models that it does not name.
    models = [line for line in short.partition("For maps")[0].splitlines() if line.startswith("  ")]
    counts = [re.search(r"and (\d+) more", line) for line in models]
    others = sum(int(count[1]) for count in counts if count)
    listed = set(re.findall(r"[^\s,]+", short))
    named = [name for name in catalogue.names() if {name, name.partition("-")[2]} & listed]
    assert {"ViT-B/16", "DINOv2-S/14", "PE-Core-B/16", "TinyCLIP-8M/16"} <= set(named)
    assert others > 0 and len(named) + others >= len(catalogue.names())
    words = short.partition("images and words")[2].partition("For maps")[0]
    assert re.findall(r"^  (\S+)", words, re.MULTILINE) == ["CLIP", "PE", "SigLIP", "SigLIP2", "TinyCLIP"]
    assert re.search(r"^  PE .* Lang-G/14", short.partition("For features")[2].partition("For images")[0], re.MULTILINE)
    rows = json.loads(run("list", "--json"))
    assert [row["name"] for row in rows] == catalogue.names()
    for row in rows:
        card = cards.card(row["name"])
        assert (row["family"], row["default"], row["weights"][0]) == (card.family, card.default, card.default)
        assert row["parameters"] > 0 and row["image_size"] >= 32 and row["license"]


def test_a_pattern_that_nothing_matches_lists_nothing() -> None:
    assert [line.split()[0] for line in run("list", "R50*").splitlines()] == ["R50+ViT-B/16", "R50+ViT-L/32"]
    assert run("list", "X*") == ""
    assert json.loads(run("list", "X*", "--json")) == []
    assert "no model of the zoo matches 'swin'" in CliRunner().invoke(cli.app, ["list", "swin"]).stderr


def test_the_name_of_another_package_finds_the_model_and_says_where_its_weights_are() -> None:
    for command in ("list", "show"):
        result = CliRunner().invoke(cli.app, [command, "vit_base_patch16_224"])
        assert result.exit_code == 0 and result.stdout.startswith("ViT-B/16 ")
        source = "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/model.safetensors"
        assert result.stderr.strip().endswith(f"ViT-B/16 --weights {source}")
        assert CliRunner().invoke(cli.app, [command, "b16"]).stderr == ""


def shown(*arguments: str) -> Any:
    return json.loads(run("show", *arguments, "--json"))


def test_the_parts_of_a_summary_are_the_whole_model() -> None:
    for name in ("ViT-B_16", "R26+ViT-S_32"):
        said = shown(name, "--image-size", "384")
        width = said["hidden_size"]
        assert said["parameters"] == OFFICIAL[name][2] == sum(part["parameters"] for part in said["parts"])
        assert said["flops"] == sum(part["flops"] for part in said["parts"])
        head = {"name": "head", "copies": 1, "output": [1000], "parameters": 1000 * (width + 1)}
        assert said["parts"][-1] == {**head, "flops": 2 * width * 1000}
    said = shown("B/16", "--image-size", "224x192")
    expected = {"image_size": [224, 192], "grid": [14, 12], "tokens": 169, "hidden_size": 768, "mlp_dim": 3072}
    expected |= {"name": "ViT-B/16", "num_heads": 12, "num_layers": 12, "num_classes": 1000, "patch_size": [16, 16]}
    assert expected.items() <= said.items()
    assert [part["output"] for part in said["parts"]][:2] == [[14, 12, 768], [169, 768]]


def test_a_summary_is_of_the_default_weights_and_followed_by_the_card() -> None:
    printed = run("show", "B/16")
    assert printed.splitlines()[0] == "ViT-B/16 at 384 x 384, augreg-imagenet21k+imagenet2012"
    assert printed.endswith(f"\n\n{catalogue.details(cards.card('B/16'))}\n")
    for said in ("86,859,496", "12 x attention, 12 heads of 64", "MLP, 3,072 wide, gelu_tanh", "24 x 24 patches"):
        assert said in printed
    assert shown("B/16")["weights"] == json.loads(json.dumps(zoo.table("B/16")))
    # 17.56 G multiply-adds in torchvision's page of vit_b_16; 86,567,656 parameters there and in timm.
    small = run("show", "B/16", "--image-size", "224")
    assert "35.1 GFLOP an image: 17.6 G multiply-adds" in small and "86,567,656" in small


@pytest.mark.full
def test_a_summary_fits_a_terminal() -> None:
    one_of_each_family = {cards.card(name).family: name for name in reversed(catalogue.names())}
    for name in one_of_each_family.values():
        card = cards.card(name)
        weights = card.weights[card.default]
        lines = show.summary(weights, weights.whole_config()).splitlines()
        assert max(map(len, lines)) <= 100, name
        assert not [line for line in lines if line != line.rstrip()], name


def test_a_head_that_only_the_file_knows_is_not_counted_and_that_is_said() -> None:
    kitti = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--kitti-steps_20k-lr_0.03-res_384"
    assert "not counted: only the file states" in run("show", kitti)
    said = shown(kitti)
    assert said["num_classes"] is None
    assert said["parameters"] == OFFICIAL["ViT-B_16"][2] - 769_000
    assert [row["load"] for row in said["weights"]] == [f"keras_vit.zoo.load({kitti!r})"]


def test_arithmetic_at_another_resolution_is_what_is_published() -> None:
    # Swin's table 1 (arXiv 2103.14030) for 384 pixels, in 1e9 multiply-adds. It has 17.5 where torchvision counts
    # 17.56 (DeiT-B at 224), so its last digit is not rounded exactly: 0.3 % of 55.4 is two units of it.
    for name, published in (("B/16", 55.4), ("L/16", 190.7)):
        assert shown(name, "--image-size", "384")["flops"] / 2e9 == pytest.approx(published, rel=0.003)


# ---- predict, convert, resize


def test_predict_ranks_the_classes_of_every_picture(digit: Path) -> None:
    rows = json.loads(run("predict", "digits", digit, digit, "--top", "3", "--json"))
    assert [row["image"] for row in rows] == [str(digit)] * 2
    best = rows[0]["predictions"]
    assert len(best) == 3 and best[0]["label_id"] == "0" and best[0]["probability"] > 0.5
    assert sum(each["probability"] for each in best) <= 1 + 1e-6  # float32's rounding
    printed = run("predict", DIGITS, digit, "--top", "2").splitlines()
    assert len(printed) == 3 and printed[0] == str(digit)
    assert re.fullmatch(r" +\d+\.\d\d%  .+  \(0\)", printed[1])
    line = ["predict", "ViT-digits", digit, "--weights", DIGITS, "--image-size", "48x40", "--json"]
    assert len(json.loads(run(*line))[0]["predictions"]) == 5
    [row] = json.loads(run("predict", "digits", digit, "--weights", "none", "--json"))  # random ones: a head of zeros
    assert {round(each["probability"], 6) for each in row["predictions"]} == {0.1}


def test_predict_without_a_head_says_embed_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded or downloaded")

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    zoo.load("digits", num_classes=0).save(tmp_path / "headless.keras")
    monkeypatch.setattr(pretrained, "load_resolved", load)
    for model in (str(tmp_path / "headless.keras"), "DINOv2-B/14"):
        message = fails(monkeypatch, "predict", model, tmp_path / "a.png")
        assert f"{model} has no head for classes" in message and f"keras-vit embed {model} IMAGES" in message


@pytest.mark.full
def test_a_name_of_the_zoo_stays_one_though_a_folder_has_it(
    digit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    assert len(run("predict", "digits", digit, "--top", 1).splitlines()) == 2
    assert "digits" in fails(monkeypatch, "predict", "./digits", digit)


def test_the_tour_leaves_files_of_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")
    assert "a folder of its own" in fails(monkeypatch, "demo", "--out", tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("report.html", "thesis.tex"), "mine"
    )


def test_convert_writes_another_format_resolution_and_head(tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    line = ["convert", TOKEN, out, "--to", "google", "--image-size", "24x48", "--num-classes", "0"]
    line += ["--config", "image_size=32"]
    assert run(*line).strip() == str(out)
    config = converters.read_config(out, config={"image_size": (24, 48)})
    assert (config.grid, config.num_classes) == ((3, 6), 0)
    converters.load(TOKEN).save(tmp_path / "model.keras")
    run("convert", tmp_path / "model.keras", tmp_path / "model.npz", "--to", "google")
    before, after = reference.arrays(TOKEN), reference.arrays(tmp_path / "model.npz")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    run("convert", "digits", tmp_path / "digits.npz", "--to", "google", "--num-classes", "3")
    assert converters.load(tmp_path / "digits.npz", num_classes=0).config.grid == (8, 8)


def test_resize_keeps_the_format_and_the_head(tmp_path: Path) -> None:
    run("resize", TOKEN, tmp_path / "out.npz", "48")
    before, after = reference.arrays(TOKEN), reference.arrays(tmp_path / "out.npz")
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["Transformer/posembed_input/pos_embedding"]
    assert after[changed[0]].shape == (1, 37, 32)
    run("resize", "digits", tmp_path / "larger.npz", "48")
    larger = converters.load(tmp_path / "larger.npz").config
    assert (converters.detect(tmp_path / "larger.npz"), larger.grid, larger.num_classes) == ("google", (12, 12), 10)


def test_a_table_of_ones_own_is_converted_from_and_facts_are_taken(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    google = (files.data_folder("converters") / "checkpoints" / "google.toml").read_text()
    table.write_text(google.replace('"embedding/kernel" = "embedding/kernel"', '"embedding/kernel" = "stem"'))
    mine, back = tmp_path / "mine.npz", tmp_path / "back.npz"
    run("convert", TOKEN, mine, "--to", table)
    run("convert", mine, back, "--from", table, "--to", "google", "--config", "num_heads=4")
    before, own, after = map(reference.arrays, (TOKEN, mine, back))
    assert "stem" in own
    assert {name: before[name].tobytes() for name in before} == {name: after[name].tobytes() for name in after}


# ---- bench


def test_slow_first_calls_are_told_apart() -> None:
    calls: list[float] = []

    def call(images: np.ndarray) -> None:
        calls.append(0.2 if not calls else 0.01)
        time.sleep(calls[-1])

    found = demo.measure(functools.partial(timed, call), np.zeros((4, 1)), rounds=10)
    assert found["first_ms"] >= 200
    # A sleep is at least as long as requested; on a busy machine it is longer.
    assert 10 <= found["median_ms"] <= found["p90_ms"]
    assert found["images_per_second"] == pytest.approx(4000 / found["median_ms"])
    assert len(calls) - 1 - 10 >= demo.WARM_UP_CALLS


# ---- names, paths and URLs

# Every command that takes a model, with the model as {}.
WITH_MODEL = {
    "bench": ["{}"],
    "convert": ["{}", "out.npz", "--to", "google"],
    "embed": ["{}", "photos", "--to", "out"],
    "evaluate": ["{}", "--data", "digits"],
    "plan": ["{}", "--batch", "8"],
    "export": ["{}", "--to", "out.tflite"],
    "predict": ["{}", "digit.png"],
    "resize": ["{}", "out.npz", "48"],
    "search": ["vectors", "digit.png", "--model", "{}"],
    "train": ["finetune-digits", "--model", "{}", "--data", "digits"],
    "verify": ["out.tflite", "{}"],
    "visualize": ["{}", "digit.png"],
}


@pytest.mark.full
def test_all_commands_agree_whether_a_text_is_a_name_a_path_or_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = {name for name in COMMANDS if {"model", "source"} & {p.name for p in GROUP.commands[name].params}}
    assert taking == set(WITH_MODEL)
    for folder in ("digits", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "saved_model.pb").touch()
    for name in ("digit.png", "mine.npz", "out.tflite"):
        (tmp_path / name).write_text("a file")
    facts = {"source": str(tmp_path), "rows_per_file": 9, "what": "embeddings", "weights": ""}
    open_folder(tmp_path / "vectors", facts, {"working_folder": str(tmp_path)})
    monkeypatch.chdir(tmp_path)

    def fetched(choice: pretrained.ResolvedModel) -> Path:
        raise ValueError(f"loads {choice.source}")

    monkeypatch.setattr(pretrained, "fetch_source", fetched)
    # `digits` is a name although there is a folder of that name.
    sources = {"digits": str(DIGITS)} | {
        path: path for path in ("./digits", "mine", "mine.npz", "runs/mine", "https://host/mine.npz")
    }
    # bench also runs SavedModels, plan needs no weights of a name.
    others = {("./digits", "bench"), ("mine", "bench"), ("digits", "plan")}
    pairs = {(model, command) for model in sources for command in WITH_MODEL} - others
    for model, command in sorted(pairs):
        arguments = [argument.format(model) for argument in WITH_MODEL[command]]
        assert fails(monkeypatch, command, *arguments) == f"keras-vit: loads {sources[model]}", (command, model)


# ---- completion and variables

COMPLETED = {
    "keras-vit show ViT-L": ["ViT-L/16", "ViT-L/32"],
    "keras-vit evaluate dig": ["digits"],
    "keras-vit export ViT-B/16 --weights sa": ["sam"],
    "keras-vit train finetune-d": ["finetune-digits"],
    "keras-vit convert in out --to goo": ["google"],
    "keras-vit export digits --to out --quantize int8": ["int8"],
    "keras-vit sho": ["show"],
}


def test_a_shell_completes_what_a_command_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KERAS_VIT_COMPLETE", "complete_bash")
    for line, offered in COMPLETED.items():
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            cli.app(prog_name="keras-vit")
        assert capsys.readouterr().out.split() == offered, line


def test_the_page_of_variables_has_those_that_the_source_reads() -> None:
    variable = re.compile(r"(?:KERAS|HF|TF|TPU|CUDA)_[A-Z_]+")
    read: set[str] = set()
    for tree in TREES.values():
        if "os.environ" in ast.unparse(tree):
            # Those that the package sets for others are keys of dicts.
            keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
            texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in keys]
            read |= {text.value for text in texts if isinstance(text.value, str) and variable.fullmatch(text.value)}
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(read)
