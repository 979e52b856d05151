"""Distillation: the objectives against NumPy, the teacher's view, its classes, photos without labels, exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

from keras_vit import ViTConfig, train
from keras_vit.errors import CheckpointError
from keras_vit.model.cost import count
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import distill, planner, strategies
from model_weights import assert_same_bits, values
from refusals import unrefused
from tiny_models import built, randomised, tiny

SEED = tf.constant([1, 2], tf.int32)
# Sums of some hundred float32 products of size 1, by two programs.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
IMAGENET = {"preprocessing": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}}
SHORT: dict[str, Any] = {"epochs": None, "steps": 4, "batch_size": 8, "flip": False, "crop": "none", "xla": False}


def models(**teacher: Any) -> tuple[VisionTransformer, VisionTransformer]:
    """Return a student and a teacher of another size, patch size, width and preprocessing, with random weights."""
    other = {"image_size": 48, "patch_size": 16, "hidden_size": 48, **IMAGENET, **teacher}
    return randomised(VisionTransformer(tiny())), randomised(VisionTransformer(tiny(**other)))


def views(side: int = 48) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, side, side, 3)).astype(np.uint8)


def view_batch(student: VisionTransformer, pixels: np.ndarray) -> dict[str, Any]:
    """Return a batch as the pipeline does: normalised for the student, at the size of the view."""
    return {"image": tf.constant((pixels / 255 - 0.5) / 0.5, tf.float32), "label": tf.one_hot([0, 1, 2], 5)}


def downscaled(pixels: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(tf.image.resize(pixels, (side, side), antialias=True))


def test_the_loss_of_classes_is_that_of_numpy() -> None:
    student, teacher = models()
    pixels = views()
    own = student((downscaled(pixels, 32) / 255 - 0.5) / 0.5).numpy()
    target = teacher(teacher.preprocess(pixels)).numpy()
    for fields in ({"temperature": 2.0}, {"hard_targets": True}, {"label_weight": 0.25}):
        recipe = train.recipe("distill", **SHORT, **fields)
        objective = distill.logits_losses(recipe, student, teacher)
        losses, metrics = objective(student, view_batch(student, pixels), SEED)
        t = recipe.temperature
        expected = t**2 * special.rel_entr(special.softmax(target / t, -1), special.softmax(own / t, -1)).sum(-1)
        if recipe.hard_targets:
            expected = -special.log_softmax(own, -1)[range(3), target.argmax(-1)]
        if recipe.label_weight:
            expected = 0.75 * expected - 0.25 * special.log_softmax(own, -1)[range(3), range(3)]
        np.testing.assert_allclose(losses, expected, **CLOSE)
        np.testing.assert_array_equal(metrics["agreement"], own.argmax(-1) == target.argmax(-1))


def test_the_loss_of_features_is_that_of_numpy() -> None:
    student, teacher = (randomised(model.with_config(model.config.replace(num_classes=0))) for model in models())
    recipe = train.recipe("distill-features", **SHORT, patch_weight=0.5)
    whole = randomised(distill.FeatureDistillation(student, teacher))
    pixels = views()
    losses, metrics = distill.features_losses(recipe, student, teacher)(whole, view_batch(student, pixels), SEED)

    def features(model: VisionTransformer, images: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
        found = model.features(images, ["encoder_norm", "pre_logits"])
        return found["pre_logits"].numpy(), found["encoder_norm"].numpy()[:, 1:].reshape(3, rows, rows, -1)

    own = features(student, (downscaled(pixels, 32) / 255 - 0.5) / 0.5, 4)
    target = features(teacher, teacher.preprocess(pixels), 3)
    image, patches = (
        x @ layer.kernel + layer.bias for x, layer in zip(own, (whole.image_map, whole.patch_map), strict=True)
    )
    wanted, wanted_patches = ((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in target)
    wanted_patches = tf.image.resize(wanted_patches, (4, 4), antialias=True).numpy()
    expected = ((image - wanted) ** 2).mean(-1) + 0.5 * ((patches - wanted_patches) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(losses, expected, **CLOSE)
    cosine = (np.asarray(image) * wanted).sum(-1) / np.linalg.norm(image, axis=-1) / np.linalg.norm(wanted, axis=-1)
    np.testing.assert_allclose(metrics["cosine"], cosine, **CLOSE)


@pytest.mark.full
def test_a_teacher_of_another_kind_has_features_of_patches() -> None:
    for changes in ({"classifier": "gap", "final_norm": "pooled"}, {"classifier": "map"}, {"num_registers": 2}):
        student, teacher = models(num_classes=0, class_token=None, **changes)
        whole = distill.FeatureDistillation(student.with_config(student.config.replace(num_classes=0)), teacher)
        objective = distill.features_losses(train.recipe("distill-features", **SHORT), student, teacher)
        losses, _ = objective(whole, view_batch(student, views()), SEED)
        assert losses.shape == (3,) and np.isfinite(losses).all(), changes


@pytest.mark.full
def test_the_teacher_stays_as_it_is_and_the_student_is_an_ordinary_model(tmp_path: Path) -> None:
    _, teacher = models(num_layers=1)
    before = [w.numpy() for w in teacher.weights]
    data = {"train": (views().repeat(3, 0), np.arange(9) % 5), "evaluation": (views(), np.arange(3)), "num_classes": 5}
    result = train.run(
        train.recipe("distill", **SHORT, mixup=0.5),
        model=tiny(num_layers=1),
        teacher=teacher,
        data=data,
        out=tmp_path,
        progress=False,
    )
    for was, weight in zip(before, teacher.weights, strict=True):
        np.testing.assert_array_equal(was, weight)
    assert result.history[0].keys() >= {"loss", "agreement", "accuracy"}
    assert result.metrics.keys() == {"accuracy", "top5", "loss"}
    saved = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.path for v in saved.weights] == [v.path for v in result.model.weights]


@pytest.mark.full
def test_photos_need_no_labels(tmp_path: Path) -> None:
    for number, pixels in enumerate(views()):
        keras.utils.save_img(tmp_path / f"{number}.png", pixels)
    (tmp_path / "notes.txt").write_text("not a photo")
    teacher = built(image_size=48, labels=tuple("abcde"))
    with pytest.warns(UserWarning, match=r"not read: 1.*notes\.txt"):
        result = train.run(
            train.recipe("distill", **SHORT), model=tiny(num_classes=3), teacher=teacher, data=tmp_path, progress=False
        )
    assert result.model.config.labels == tuple("abcde")
    assert result.metrics == {} and "accuracy" not in result.history[-1]
    recipe = train.recipe("distill-features", **SHORT)
    result = train.run(recipe, model=tiny(), teacher=teacher, data={"train": (views(), None)}, progress=False)
    assert result.model.output_shape == (None, 32)


def chosen(out: Path | None, teacher: Any, steps: int = 1, **fields: Any) -> tuple[train.Recipe, tuple[int, int]]:
    """Run a step of a student of 32 pixels; return the recipe, and the size of the images that the teacher gets."""
    sizes = []
    copy = distill.Teacher.copy_model

    def watched(self: distill.Teacher, recipe: train.Recipe) -> VisionTransformer:
        model = copy(self, recipe)
        sizes.append(model.config.size)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill.Teacher, "copy_model", watched)
        recipe = train.recipe("distill-features", epochs=None, steps=steps, xla=False, crop="none", **fields)
        data = {"train": (np.repeat(views(32), 16, 0), None)}
        result = train.run(recipe, model=tiny(), teacher=teacher, data=data, out=out, progress=False)
    return result.recipe, sizes[0]


@pytest.mark.full
@pytest.mark.skipif(not strategies.is_cpu(), reason="on a GPU nothing is chosen")
def test_a_cpu_gets_a_batch_and_a_size_of_the_teacher_from_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, teacher = models(num_layers=1, image_size=160)
    teacher.save(tmp_path / "teacher.keras")
    path = tmp_path / "teacher.keras"
    student, other = VisionTransformer(tiny()).config, teacher.config.replace(image_size=32)
    one = 3 * count(student).flops + count(other).flops
    monkeypatch.setattr(planner, "CPU_STEP_FLOPS", 20 * one)
    recipe, size = chosen(tmp_path / "run", path)
    assert (recipe.teacher_size, recipe.batch_size, size) == (32, 16, (32, 32))
    monkeypatch.setattr(planner, "CPU_STEP_FLOPS", 1e12)  # the run keeps what it began with, on any machine
    again, size = chosen(tmp_path / "run", path)
    assert (again.teacher_size, again.batch_size, size) == (32, 16, (32, 32))
    recipe, size = chosen(None, path, teacher_size=48, batch_size=8)  # what the user states is kept,
    assert (recipe.teacher_size, recipe.batch_size, size) == (48, 8, (48, 48))
    recipe, size = chosen(None, teacher)  # also the size of a model of his own
    assert (recipe.teacher_size, recipe.batch_size, size) == (None, 32, (160, 160))


IMAGES = {"train": (views(), np.arange(3)), "class_names": ("a", "b", "c")}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "needs a teacher"),
    ({"recipe": "digits", "teacher": "digits"}, "takes no teacher"),
    ({"teacher": tiny()}, "teacher of 5 classes, and 3 in arrays"),
    ({"teacher": tiny(num_classes=3, labels=("a", "b", "x"))}, "model does not have: c"),
    ({"teacher": tiny(num_classes=0)}, "compares the classes of images"),
    ({"recipe": "distill-features", "teacher": tiny(classifier="unpooled")}, "no feature of the whole image"),
    ({"recipe": "distill-features", "teacher": tiny(num_channels=1)}, "equally many channels. Received: 3 and 1"),
    ({"teacher": "nothing/here.keras"}, "no file or folder"),
]


@pytest.mark.full
def test_a_teacher_that_does_not_fit_is_refused() -> None:
    def run(recipe: str = "distill", teacher: Any = None) -> train.Result:
        if isinstance(teacher, ViTConfig):
            teacher = VisionTransformer(teacher)
        fields = SHORT if recipe != "digits" else {"steps": 4}
        return train.run(train.recipe(recipe, **fields), model=tiny(), teacher=teacher, data=IMAGES, progress=False)

    assert not unrefused(run, WRONG)


@pytest.mark.full
def test_a_stopped_run_ends_the_same_bit_for_bit_and_not_with_another_teacher(tmp_path: Path) -> None:
    recipe = train.recipe("distill-features", **SHORT, checkpoint_steps=2)
    _, teacher = models()
    arguments: dict[str, Any] = {"model": tiny(), "data": {"train": (views(), None)}, "progress": False}
    whole = train.run(recipe, teacher=teacher, out=tmp_path, **arguments)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    (tmp_path / "model.keras").unlink()
    again = train.run(recipe, teacher=teacher, out=tmp_path, **arguments)
    assert_same_bits(values(again.model), values(whole.model))
    other = randomised(teacher.with_config(teacher.config), seed=9)
    with pytest.raises(CheckpointError, match=r"teacher\.weights"):
        train.run(recipe, teacher=other, out=tmp_path, **arguments)


@pytest.mark.full
def test_the_plan_counts_the_teacher() -> None:
    alone = train.plan("Ti/16", batch_size=8)
    taught = train.plan("Ti/16", batch_size=8, teacher="B/16")
    assert taught.teacher > 4 * 86_567_656  # its float32 weights; the paper's table 1 has 86 M
    assert taught.total - alone.total == taught.teacher
    assert taught.step_flops > alone.step_flops
