"""What comes out of a model is a number, and belongs to one class: NaN, infinity, many classes, one name twice."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import command_line
import map_folders
from keras_vit import VisionTransformer, batch, dense, errors, train, visualize
from keras_vit.cli.predict import _depth_scale, map_each
from keras_vit.dense.map_tasks import Segmentation
from keras_vit.model.labels import distinct
from refusals import unrefused
from tiny_models import built, tiny

SIZE = {"image_size": 16, "patch_size": 8, "num_layers": 1, "hidden_size": 16, "mlp_dim": 16, "num_heads": 2}
FIELDS: dict[str, Any] = {"steps": 2, "batch_size": 4, "xla": False, "log_steps": 1, "epochs": None}
NOT_FINITE = "must compute finite numbers. Received: NaN or infinity"


def photos(count: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), np.uint8)


def labelled(classes: int = 3) -> dict[str, Any]:
    pair = photos(), np.arange(6) % 3
    return {"train": pair, "evaluation": pair, "num_classes": classes}


def classifier(**changes: Any) -> VisionTransformer:
    return built(**SIZE | {"num_classes": 3} | changes)


def broken(model: Any, layer: str, value: float) -> Any:
    """Put a number into one weight of a layer, the last one of its bias or of its only weight."""
    weight = model.get_layer(layer).weights[-1]
    values = np.array(weight)
    values.flat[-1] = value
    weight.assign(values)
    return model


def test_equal_names_are_told_apart_by_the_number_of_the_class() -> None:
    assert distinct(["a", "b"]) == ["a", "b"]
    for names in (["a", "a", "a (0)"], ["a", "a (1)", "a", "a (1)"], [""] * 4):
        found = distinct(names)
        assert len(set(found)) == len(names)
        assert all(new.startswith(name) for new, name in zip(found, names, strict=True))
    model = classifier(labels=("a", "b", "a"))
    assert train.examine(model, labelled()).classes == ["a (0)", "b", "a (2)"]


@pytest.mark.full
def test_a_model_that_computes_nan_is_not_measured() -> None:
    model = classifier()
    for value in (np.nan, np.inf):
        for measure in (train.evaluate, train.examine):
            with pytest.raises(ValueError, match=NOT_FINITE):
                measure(broken(model, "head", value), labelled())


def test_a_class_that_is_never_predicted_is_measured_and_a_class_that_does_not_occur_is_null() -> None:
    model = broken(classifier(), "head", -np.inf)
    data = {"evaluation": (photos(4), np.arange(4) % 2), "num_classes": 3}
    found = train.evaluate(model, data)
    assert np.isfinite(found.loss) and train.examine(model, data).accuracy == found.top1
    task = Segmentation(num_classes=2)
    totals = dict(zip(task.sum_names, task.sums(*_one_class()).numpy().tolist(), strict=True))
    counts = {"count": 1, "unlabelled": 0, "skipped": 0, "images_per_second": 1.0}
    result = train.Evaluation(data="x", labels="single", metrics={}, by_class=task.by_class(totals), **counts)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["by_class"]["1"]["iou"] is None


def _one_class() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits = np.stack([np.ones((1, 2, 2)), np.zeros((1, 2, 2))], axis=-1).astype(np.float32)
    return logits, np.zeros((1, 2, 2), np.int32), np.ones(1)


@pytest.mark.full
def test_a_diverged_run_is_not_evaluated() -> None:
    recipe = train.recipe("digits", **FIELDS | {"log_steps": 50, "eval_steps": 1})
    with pytest.raises(errors.DivergedError):
        train.run(recipe, model=broken(classifier(), "head", np.nan), data=labelled(), progress=False)


def test_a_teacher_that_computes_nan_teaches_nothing() -> None:
    recipe = train.recipe("distill", **FIELDS, hard_targets=True)
    teacher = broken(classifier(), "head", np.nan)
    with pytest.raises(ValueError, match=NOT_FINITE):
        train.run(recipe, model=tiny(num_classes=3), teacher=teacher, data=labelled(), progress=False)


def test_a_stored_model_of_maps_with_nan_is_refused(tmp_path: Path) -> None:
    broken(dense.segmenter(classifier(), 3), "map_logits", np.nan).save(tmp_path / "model.keras")
    with pytest.raises(errors.CheckpointError, match="map_logits/bias holds values that are not finite"):
        dense.load(tmp_path / "model.keras")
    model = dense.load(tmp_path / "model.keras", allow_nonfinite=True)
    with pytest.raises(ValueError, match=NOT_FINITE):
        model.predict_maps(photos(1))


# ---- predict --to: what a PNG file holds


def written(model: Any, folder: Path) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return the PNG of a photo's map, the map, and the row that is printed."""
    photo = folder / "photo.jpg"
    Image.fromarray(photos(1)[0]).save(photo)
    [row] = map_each(model, [str(photo)], to=folder / "maps", top=1)
    if isinstance(row, Exception):
        raise row
    with Image.open(folder / "maps" / "photo.png") as file:
        return np.asarray(file), model.predict_maps(photo)[0], row


@functools.cache
def segmenter(classes: int) -> dense.DenseModel:
    """Return a model whose best class is often the last one."""
    model = dense.segmenter(classifier(), classes)
    bias = model.get_layer("map_logits").bias
    bias.assign(np.where(np.arange(classes) == classes - 1, 9.0, 0))
    return model


@pytest.mark.full
def test_a_png_has_the_numbers_of_all_classes(tmp_path: Path) -> None:
    for classes in (256, 300):
        values, classes_of_pixels, _ = written(segmenter(classes), tmp_path)
        np.testing.assert_array_equal(values, classes_of_pixels)
        assert values.max() == classes - 1


@pytest.mark.full
def test_a_png_has_every_distance(tmp_path: Path) -> None:
    for max_depth, scale in {10: 1000, 65.5: 1000, 200: 256, 1000: 65.535, 1e5: 0.65535}.items():
        assert _depth_scale(max_depth, np.float32([max_depth / 2])) == pytest.approx(scale)
        assert _depth_scale(max_depth, np.float32([2 * max_depth])) * 2 * max_depth < 65536
    values, metres, row = written(dense.depth(classifier(num_layers=4), max_depth=1000), tmp_path)
    assert metres.max() > 256 and row["depth"]["values_per_unit"] == pytest.approx(65.535)
    np.testing.assert_allclose(values / 65.535, metres, atol=0.01)


# ---- every function that gives results x every number that is none

OF_FEATURES = ("embed", "few_shot", "linear-probe", "embed embeddings", "distill-features")  # without the head


def results(model: Any, data: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what gives results of a classifier, by name."""
    recipes = {name: train.recipe(name, **FIELDS) for name in ("distill", "distill-features")}
    teach = functools.partial(train.run, model=tiny(**SIZE, num_classes=3), teacher=model, data=data, progress=False)
    embed = functools.partial(batch.embed, model, str(folder / "photos"), progress=False)
    return {
        "classify": lambda: [[row._asdict() for row in rows] for rows in model.classify(photos(2), top=3)],
        "embed": lambda: batch.search(model.embed(photos(3)), model.embed(photos(1)))[0],
        "evaluate": lambda: train.evaluate(model, data).to_dict(),
        "examine": lambda: _examined(model, data),
        "few_shot": lambda: train.few_shot(model, data, shots=(1,)),
        "linear-probe": lambda: train.run("linear-probe", model=model, data=data, progress=False).metrics,
        "report": lambda: visualize.report(model, photos(2), folder / "report.html", progress=False).name,
        **{name: lambda recipe=recipe: teach(recipe).history for name, recipe in recipes.items()},
        **{
            f"embed {what}": lambda what=what: _all_rows(embed(to=tempfile.mkdtemp(dir=folder) + "/rows", what=what))
            for what in ("embeddings", "logits", "probabilities", "classes")
        },
    }


def _examined(model: Any, data: Any) -> Any:
    found = train.examine(model, data)
    assert found.accuracy == train.evaluate(model, data).top1
    return found.to_dict()


def map_results(model: Any, data: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what gives results of a model of maps, by name."""

    def evaluate() -> Any:
        found = train.evaluate(model, data)
        if found.by_class:
            assert found.mean_iou == pytest.approx(np.nanmean([each["iou"] for each in found.by_class.values()]))
            assert len(found.by_class) == model.task.num_classes
        return found.to_dict()

    def predict_to() -> Any:
        values, pixels, row = written(model, folder)
        np.testing.assert_array_equal(values, pixels)
        return row

    return {
        "predict_maps": lambda: [pixels.tolist() for pixels in model.predict_maps(photos(1))],
        "evaluate": evaluate,
        "predict --to": predict_to,
    }


def _all_rows(result: batch.EmbedResult) -> int:
    if result.errors:
        raise ValueError(f"{result.errors} rows have an error")
    return result.rows


Case = tuple[str, Callable[[], Any], bool]  # name, call, and whether the call has to end in an error


def broken_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of weights that are no numbers."""
    images, classes = map_folders.arrays(2)
    masks = {"evaluation": (images, np.where(classes == 255, 2, classes)), "num_classes": 3}  # all pixels count
    depths = {"evaluation": (images, map_folders.metres(classes))}
    for layer, values in {"head": (np.nan, -np.inf), "embedding": (np.nan,)}.items():
        for value in values:
            for name, call in results(broken(classifier(), layer, value), labelled(), folder).items():
                if layer == "embedding" or name not in OF_FEATURES:
                    # -inf in the head: a class that is never predicted
                    fails = layer == "embedding" or value != -np.inf or name in ("embed logits", "distill")
                    yield f"{name}, {value} in {layer}", call, fails
    for value in (np.nan, np.inf, -np.inf):
        for model, data, layer in (
            (dense.segmenter(classifier(), 3), masks, "map_logits"),
            (dense.depth(classifier(), head="linear", max_depth=9), depths, "map_bins"),
        ):
            for name, call in map_results(broken(model, layer, value), data, folder).items():
                yield f"{name}, {value} in {layer}", call, True


def class_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of doubled names, and of many classes."""
    images, classes = map_folders.arrays(2)
    masks = {"evaluation": (images, np.where(classes == 255, 2, classes)), "num_classes": 3}  # all pixels count
    for name, call in results(classifier(labels=("a", "b", "a")), labelled(), folder).items():
        yield f"{name}, doubled names", call, False
    for name, call in map_results(dense.segmenter(classifier(), 3, labels=["a", "b", "a"]), masks, folder).items():
        yield f"{name}, doubled names", call, False
    for count in (300, 70_000):
        for name, call in results(classifier(num_classes=count), labelled(count), folder).items():
            if name in ("classify", "evaluate", "embed classes") or (name not in OF_FEATURES and count < 1000):
                yield f"{name}, {count} classes", call, False
        for name, call in map_results(segmenter(count), masks | {"num_classes": count}, folder).items():
            yield f"{name}, {count} classes", call, name == "evaluate" or (name == "predict --to" and count > 65536)


def _is_strict(result: Any) -> bool:
    try:
        return bool(json.dumps(result, allow_nan=False))
    except ValueError:
        return False


@pytest.mark.full
def test_every_result_is_right_or_an_error_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(photos(3)):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    not_held = {}
    for name, call, fails in (*broken_cases(tmp_path), *class_cases(tmp_path)):
        try:
            result = call()
        except (ValueError, errors.DivergedError) as error:
            if not fails:
                not_held[name] = str(error)
        except Exception as error:
            not_held[name] = repr(error)
        else:
            if fails or not _is_strict(result):
                not_held[name] = f"{result!r:.200}"
    assert not not_held


@pytest.mark.full
def test_the_commands_refuse_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(photos(1)[0]).save(tmp_path / "photo.png")
    for name, model in {
        "classes": broken(classifier(), "head", np.nan),
        "maps": broken(dense.segmenter(classifier(), 3), "map_logits", np.nan),
    }.items():
        model.save(tmp_path / f"{name}.keras")
        for command in ("predict", "visualize"):
            told = command_line.fails(monkeypatch, command, tmp_path / f"{name}.keras", tmp_path / "photo.png")
            assert "/bias holds values that are not finite" in told


@pytest.mark.full
def test_files_of_distances_are_numbers(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=3, kind="depth")
    meter = dense.depth(classifier(), head="linear", max_depth=9)

    def evaluate(value: float) -> None:
        (folder / "val/depth/01.png").unlink(missing_ok=True)
        metres = np.ones(map_folders.SIZES[1])
        metres[0] = value
        np.save(folder / "val/depth/01.npy", metres)
        train.evaluate(meter, folder, split="val", on_bad_image="fail")

    assert not unrefused(evaluate, [({"value": value}, "negative or infinite") for value in (np.inf, -np.inf, 1e300)])
    evaluate(np.nan)
