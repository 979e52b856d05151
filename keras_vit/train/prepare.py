"""Prepare what a run trains: load the model, adapt it to recipe and data, and place it on the devices."""

import os
import warnings
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util.checks import is_count
from keras_vit._util.text import byte_size, duration, warn
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.dense.model import DenseModel, depth, segmenter
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import cpu_seconds
from keras_vit.model.task import Task
from keras_vit.model.vision_transformer import HEADS, VisionTransformer, hash_weights
from keras_vit.train import distill, masked_patch, memory, planner, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import newest, plain_path
from keras_vit.train.data.pipeline import decode
from keras_vit.train.data.split import Data, Order, are_comparable, check_kind, match_data
from keras_vit.train.label_check import class_weights
from keras_vit.train.objective import Objective, supervised
from keras_vit.train.optimizer import enable_lora, is_of_head, trained_variables
from keras_vit.train.step import TrainState
from keras_vit.zoo.pretrained import ResolvedModel, load_any, open_model, resolve

# Recipes are written for large data sets and large images. These suit fewer and smaller ones.
FEW_IMAGES, MOST_PASSES = 10_000, 100  # with fewer training images than this, so many passes over them
USUAL_SIZE = 224  # pixels of pre-training: images are not enlarged far beyond their own size and this one
SIZED_IMAGES = 16  # whose sizes are read
# Fields that decide what is trained.
OF_TRAINED = [
    *("train_only", "freeze", "lora_rank", "lora_targets", "linear_probe", "head_start", "head", "reset_head"),
    *("config", "layers", "objective"),
]

Model: TypeAlias = VisionTransformer | DenseModel
Source: TypeAlias = ResolvedModel | ViTConfig | Model  # the beginning of a run
PrintLine: TypeAlias = Callable[[str], None]


def choose_model(
    recipe: Recipe,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer | DenseModel,
    weights: str | os.PathLike[str] | None = None,
) -> Source:
    """Resolve the argument `model` of `train.run`; a name or a path is loaded later."""
    if isinstance(model, ViTConfig | Model):
        if weights is not None:
            raise ValueError(
                f"weights are for a model's name. Received: weights={weights!r:.200} and model={model!r:.200}"
            )
        return model
    return resolve(model, weights, default="default" if recipe.start == "pretrained" else None)


def describe_start(source: Source) -> str:
    """Say in words which weights a run begins with."""
    if isinstance(source, Model):
        return f"a model with weights {hash_weights(source.weights)[:16]}"
    place = source.source if isinstance(source, ResolvedModel) else None
    return place or "random weights"


def build_state(
    recipe: Recipe,
    model: Source,
    data: Data,
    devices: tf.distribute.Strategy,
    *,
    teacher: distill.Teacher | None = None,
    out: str | os.PathLike[str] | None,
    print_line: PrintLine,
) -> tuple[TrainState, Data]:
    """Load the model and create the state of the training; return it, and the data with a kept head's class numbers.

    No file is written. A run in the folder `out` keeps its number of micro-batches.
    """
    check_devices(recipe, devices)
    source = check_task(recipe, load_model(recipe, model), data)
    recipe = fit_size(recipe, model, source.config, data, print_line=print_line)
    if teacher:
        recipe = fit_teacher(recipe, source.config, teacher, devices, out=out, print_line=print_line)
    recipe = fit_length(recipe, data, replicas=devices.num_replicas_in_sync, print_line=print_line)
    total = recipe.resolved_steps(data.training_split().count)
    weights, names = class_weights(recipe, data), data.class_names
    recipe, data = match_head(recipe, source.task, data)
    if weights is not None and names != data.class_names:  # the same names in another order
        weights = weights[[names.index(name) for name in data.class_names]]
    with devices.scope():
        adapted = adapt_model(recipe, source, num_classes=data.num_classes, class_names=data.class_names)
        network = teacher.copy_model(recipe) if teacher else None
        if network:
            distill.check_student(adapted, network, recipe)
        configs = (adapted.config, network.config if network else None)
        recipe = _fit_memory(recipe, configs, devices, out=out, total=total, print_line=print_line)
        objective = choose_objective(recipe, adapted, network, data, weights)
        state = TrainState(recipe, adapted, objective, total_steps=total)
    _check_head(recipe, state.model, trains_head=state.trains_head)
    if recipe.head_start == "zeros":  # otherwise the starting weights are good
        _warn_long_average(recipe, total)
    return state, data


def choose_objective(
    recipe: Recipe,
    model: Model,
    teacher: Model | None,
    data: Data,
    weights: npt.NDArray[np.float32] | None = None,
) -> Objective:
    """Make the objective that a recipe names, with its layers and the weights of classes.

    Call it in the strategy's scope.
    """
    if recipe.objective == "masked_patch":
        return masked_patch.objective(model, remat=recipe.remat)
    if teacher:
        return distill.objective(recipe, model, teacher, has_labels=data.is_labelled)
    return supervised(recipe, model, has_several_labels=data.multi_label, class_weights=weights)


def check_variants(
    recipe: Recipe, variants: Sequence[Recipe], model: Source, data: Data, devices: tf.distribute.Strategy
) -> None:
    """Raise the ValueError with which a run by one of the variants of a recipe would end, without training."""
    config: Any = getattr(model, "config", model)
    if isinstance(model, ResolvedModel):
        with open_model(model) as opened:
            config = opened.config
    for variant in variants:
        _check_fields(variant, config, data, devices)
    names = [name for name in OF_TRAINED if any(getattr(one, name) != getattr(recipe, name) for one in variants)]
    differing = {repr([getattr(one, name) for name in names]): one for one in variants} if names else {}
    model = load_model(recipe, model) if names else model
    for variant in differing.values():
        if variant.optimizer != "least_squares":  # a probe trains nothing
            _check_trained(variant, load_model(variant, model), data)


def check_run(recipe: Recipe, model: Source, data: Data, devices: tf.distribute.Strategy) -> None:
    """Raise the ValueError with which a run would end, without training."""
    loaded = load_model(recipe, model)
    _check_fields(recipe, loaded.config, data, devices)
    _check_trained(recipe, loaded, data)


def _check_fields(recipe: Recipe, config: ViTConfig, data: Data, devices: tf.distribute.Strategy) -> None:
    config.replace(**recipe.config_changes(config))  # checks the values that the model gets
    check_devices(recipe, devices)
    class_weights(recipe, data)


def _check_trained(recipe: Recipe, source: Model, data: Data) -> None:
    """Raise the ValueError of `build_state` for what is trained: nothing, or variables and layers that are missing."""
    source = check_task(recipe, source, data)
    starts_with_zeros = recipe.head_start == "zeros" and not recipe.has_teacher
    if starts_with_zeros:
        recipe, data = match_head(recipe, source.task, data)
    elif recipe.head_start == "probe":
        recipe = recipe.replace(reset_head=True)
    model = adapt_model(recipe, source, num_classes=data.num_classes, class_names=data.class_names)
    enable_lora(recipe, model)
    trained = trained_variables(recipe, model)
    if starts_with_zeros:
        _check_head(recipe, model, trains_head=any(map(is_of_head, trained)))


def _check_head(recipe: Recipe, model: Model, *, trains_head: bool) -> None:
    """Raise a ValueError for a head of zeros that is not trained: no weight would have a gradient."""
    head = [weight for weight in model.weights if is_of_head(weight)]
    if head and not trains_head and not any(np.any(one) for one in head):
        raise ValueError(
            "The head begins with zeros and is not trained: take its pattern from freeze. Received: freeze="
            f"{list(recipe.freeze)}"
        )


def check_devices(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """Raise a ValueError for settings that these devices cannot train with."""
    replicas = strategy.num_replicas_in_sync
    number = 1 if recipe.accumulation == "auto" else recipe.accumulation
    if recipe.batch_size % (replicas * number):
        raise ValueError(
            f"batch_size must be a multiple of replicas x accumulation = {replicas} x {number}. "
            f"Received: {recipe.batch_size}"
        )
    is_bfloat16 = recipe.momentum_dtype == "bfloat16"
    if is_bfloat16 and strategies.has_workers(strategy) and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            "TensorFlow cannot send bfloat16 variables between workers without GPUs: set momentum_dtype='float32'. "
            f"Received: {recipe.momentum_dtype!r:.200}"
        )


def load_model(recipe: Recipe, model: Source) -> Model:
    """Load the model that training begins with, create it with random weights, or take `model` itself."""
    if isinstance(model, Model):
        return model
    keras.utils.set_random_seed(recipe.seed % 2**32)  # so that the same random weights are drawn every time
    if isinstance(model, ViTConfig):
        return VisionTransformer(model, dtype="float32")
    with warnings.catch_warnings():  # recipe and data decide which size is trained
        warnings.filterwarnings("ignore", message=".*is loaded for images of")
        return load_any(model, dtype="float32")


def check_task(recipe: Recipe, source: Model, data: Data) -> Model:
    """Add the recipe's head to a model if maps need one; raise a ValueError if it is not for the data."""
    task = data.task
    has_maps = isinstance(task, Segmentation | Depth)
    learns_labels = not (recipe.objective == "masked_patch" or recipe.has_teacher)
    if learns_labels and recipe.objective not in task.OBJECTIVES:
        hint = ". Maps of floats are distances: pass classes as integers" * isinstance(task, Depth)
        raise ValueError(
            f"objective must be one of {list(task.OBJECTIVES)} for {task.NAME}. Received: {recipe.objective!r}{hint}"
        )
    if has_maps and isinstance(source, VisionTransformer) and recipe.head is not None:
        keras.utils.set_random_seed(recipe.seed % 2**32)
        if isinstance(task, Depth):
            source = depth(source, head=recipe.head, max_depth=recipe.max_depth)
        else:
            source = segmenter(source, data.num_classes, head=recipe.head, labels=data.class_names)
    if not learns_labels and isinstance(source, VisionTransformer):
        return source
    check_kind(data, source.task)
    if has_maps and (recipe.mixup or recipe.shift or recipe.randaugment_layers):
        raise ValueError("mixup, shift and randaugment_layers must be 0 for maps, which they would not move")
    return source


def fit_size(recipe: Recipe, model: Source, config: ViTConfig, data: Data, *, print_line: PrintLine) -> Recipe:
    """Choose a size that suits images smaller than the model's, unless recipe or user states one.

    The user states the size of a config or a model, but not that of a name or a file.
    """
    side = min(config.size)
    is_chosen = recipe.image_size is not None or recipe.is_stated("image_size") or not isinstance(model, ResolvedModel)
    if is_chosen or not USUAL_SIZE < side == max(config.size):
        return recipe
    split, config = data.training_split(), config.replace(**recipe.config_changes(config))
    split.expect(config.num_channels, config.preprocessing)
    chosen = np.unique(np.linspace(0, split.count - 1, SIZED_IMAGES).astype(np.int64))
    with split.naming_bad_image(Order(batch=1, shuffle=False), batches=split.count):
        sides = [
            min(decode(example["image"], config.preprocessing).shape[:2]) for example in split.iterate_once(only=chosen)
        ]
    if not sides:  # none of these can be decoded
        return recipe
    typical_side = int(np.median(sides))
    smaller = USUAL_SIZE * max(1, round(typical_side / USUAL_SIZE))
    if smaller > 0.75 * side:
        return recipe
    print_line(
        f"images have about {typical_side} pixels a side: trained at {smaller}, not at {side}. "
        "To choose: --image-size N"
    )
    return recipe.replace(image_size=smaller)


def fit_teacher(
    recipe: Recipe,
    config: ViTConfig,
    teacher: distill.Teacher,
    devices: tf.distribute.Strategy,
    *,
    out: str | os.PathLike[str] | None,
    print_line: PrintLine,
) -> Recipe:
    """Choose the teacher's size and the batch of a distillation: those of a run in `out`, or on a CPU less work."""
    saved, _ = _saved_run(out)
    if saved:
        names = ("teacher_size", "batch_size")
        return recipe.replace(**{name: saved.get(name) for name in names if not recipe.is_stated(name)})
    if not strategies.is_cpu():
        return recipe
    student, unit = config.replace(**recipe.config_changes(config)), _unit(recipe, devices.num_replicas_in_sync)
    keeps_size = teacher.source is None  # a model that the user made
    changes = planner.fit_work(recipe, student, teacher.model.config, keeps_size=keeps_size, unit=unit)
    if changes:
        before = {"teacher_size": max(teacher.model.config.size), "batch_size": recipe.batch_size}
        chosen = ", ".join(f"{name} {value} in place of {before[name]}" for name, value in changes.items())
        print_line(f"on a CPU: {chosen}. To choose: {' and '.join(f'--set {name}=N' for name in changes)}")
    return recipe.replace(**changes)


def _unit(recipe: Recipe, replicas: int) -> int:
    """Number whose multiples a batch may have."""
    return replicas * (1 if recipe.accumulation == "auto" else recipe.accumulation)


def _saved_run(out: str | os.PathLike[str] | None) -> tuple[dict[str, Any], int]:
    """Fields of the recipe and last step of the run in a folder; {} and 0 without one."""
    checkpoint = newest(f"{plain_path(out)}/checkpoints") if out is not None else None
    if checkpoint is None:
        return {}, 0
    saved = checkpoint[1]["facts"].get("recipe")
    return saved if isinstance(saved, dict) else {}, checkpoint[1]["step"]


def fit_length(recipe: Recipe, data: Data, *, replicas: int, print_line: PrintLine) -> Recipe:
    """Choose a batch and a number of steps that suit few images, unless the user states them."""
    count = data.training_split().count
    changes: dict[str, Any] = {}
    if recipe.batch_size > count and not recipe.is_stated("batch_size"):
        changes["batch_size"] = planner.power_of_two(count, _unit(recipe, replicas))
    steps = ceil(MOST_PASSES * count / changes.get("batch_size", recipe.batch_size))
    if count < FEW_IMAGES and (recipe.steps or 0) > steps and not recipe.is_stated("steps"):
        changes["steps"] = steps
    if not changes:
        return recipe
    chosen = ", ".join(f"{name} {value:,} in place of {getattr(recipe, name):,}" for name, value in changes.items())
    options = " and ".join(f"--set {name}=N" for name in changes)
    print_line(f"{count:,} training images of {data.num_classes:,} classes: {chosen}. To choose: {options}")
    return recipe.replace(**changes)


def match_head(recipe: Recipe, task: Task | ViTConfig, data: Data) -> tuple[Recipe, Data]:
    """Decide `reset_head` of the recipe, and give the data the class numbers of a head that is kept.

    A head for another number of classes is never kept. Raises a ValueError if one should be kept for other classes.
    """
    if not recipe.trains_head or recipe.reset_head is True:
        return recipe, data
    is_auto = recipe.reset_head == "auto"
    keeps_head = task.num_classes == data.num_classes and not is_auto
    has_names = are_comparable(task.labels, task.num_classes, data.class_names)
    if has_names and task.num_classes == data.num_classes:
        try:
            data, keeps_head = match_data(data, task.labels, task.num_classes), True
        except ValueError:
            if not is_auto:
                raise
    return recipe.replace(reset_head=is_auto and not keeps_head), data


def adapt_model(recipe: Recipe, source: Model, *, num_classes: int, class_names: Sequence[str] | None = None) -> Model:
    """Create a model with the source's weights and the recipe's changes. Call it in the scope of a strategy.

    LoRA of the source is added to its kernels. If `num_classes` of the data is not the source's, a head of zeros with
    `class_names` replaces the source's; a head without names that is kept gets them.
    """
    keras.utils.set_random_seed(recipe.seed % 2**32)
    if (policy := keras.config.dtype_policy().name) not in ("float32", recipe.precision):
        warn(
            f"keras_vit: the global dtype policy {policy!r} is not used: the recipe says "
            f"precision={recipe.precision!r}. For half precision set precision='mixed_bfloat16'"
        )
    config, labels = source.config, tuple(class_names) if class_names else None
    if isinstance(source, DenseModel):
        source = source.with_config(config.replace(**recipe.config_changes(config)), dtype=recipe.precision)
        if recipe.reset_head or source.head.num_classes != num_classes:
            head = source.head.replace(num_classes=num_classes, labels=labels)
            return DenseModel(source.backbone, head, name=source.name)
        return source
    changes: dict[str, Any] = {}
    if not recipe.trains_head:
        changes = {"num_classes": 0, "representation_size": None}
    elif recipe.reset_head or config.num_classes != num_classes:
        config = read_blocks(config, recipe.layers) if recipe.layers > 1 else config
        changes = {"num_classes": num_classes, "labels": labels}
    elif labels and not are_comparable(config.labels, num_classes, labels):
        changes = {"labels": labels}
    if recipe.trains_head:
        changes["probabilities"] = recipe.probabilities
    if recipe.reset_head:
        changes["representation_size"] = None
    target = config.replace(**changes | recipe.config_changes(config))
    return source.with_config(target, dtype=recipe.precision, fresh=HEADS if recipe.reset_head else ())


def read_blocks(config: ViTConfig, number: int) -> ViTConfig:
    """Change a config so that the feature is of up to `number` last blocks: class tokens and means of the patches.

    No-op if the config already reads that many, or has no final norm, which each block's part needs.
    Without a class token the means alone are read, or those beside the attention pool.
    """
    number = min(number, max(1, config.num_layers))
    has_own_feature = config.is_unpooled or config.distilled or config.final_norm == "none"
    if number == config.num_read_blocks or has_own_feature:
        return config
    changes = {"mean_blocks": number, "final_norm": "tokens", "normalize_features": False, "projection_head": False}
    if config.reads_class_token:
        changes["token_blocks"] = number
    return config.replace(**changes, representation_size=None)


def _fit_memory(
    recipe: Recipe,
    configs: tuple[ViTConfig, ViTConfig | None],
    devices: tf.distribute.Strategy,
    *,
    out: str | os.PathLike[str] | None,
    total: int,
    print_line: PrintLine,
) -> Recipe:
    """Choose the number of micro-batches and check that they fit; `configs` are of the model and its teacher."""
    saved, done = _saved_run(out)
    replicas, available = devices.num_replicas_in_sync, memory.device_memory(strategies.local_replicas(devices))
    is_auto = recipe.accumulation == "auto"
    if is_auto:
        number: Any = saved.get("accumulation")
        if not is_count(number, least=1) or recipe.batch_size % (replicas * number):
            number = memory.fewest_micro_batches(recipe, *configs, replicas=replicas, memory=available)
        recipe = recipe.replace(accumulation=strategies.largest(number, devices))
    if done >= total:
        return recipe  # the run is finished: nothing has to fit
    planned = planner.plan_step(recipe, *configs, replicas=replicas)
    memory.check_memory(recipe, planned, memory=available)
    if is_auto and planned.micro_batch * replicas < recipe.batch_size:
        limit = f" of {byte_size(available)}" if available is not None else ""
        where = f" on each of {replicas} devices" if replicas > 1 else ""
        print_line(
            f"batch {recipe.batch_size:,} is computed as {recipe.accumulation} micro-batches of {planned.micro_batch}"
            f"{where}: {byte_size(planned.total)}{limit}"
        )
    if strategies.is_cpu() and planned.step_flops > 2 * planner.CPU_STEP_FLOPS:
        seconds = cpu_seconds(planned.step_flops)
        print_line(
            f"a step computes {planned.step_flops / 1e12:.1f} TFLOP, perhaps {duration(seconds)} on this CPU, and "
            f"{duration(seconds * (total - done))} for {total - done:,} steps. Faster: a smaller --image-size (now "
            f"{max(configs[0].size)}), --steps or batch_size, or a smaller model"
        )
    return recipe


def _warn_long_average(recipe: Recipe, total: int) -> None:
    """Warn of a moving average that is longer than the run."""
    share = recipe.ema_decay**total if recipe.ema_decay else 0.0
    if share > 0.1:
        warn(
            f"keras_vit: with ema_decay={recipe.ema_decay} the average after {total:,} steps is {share:.0%} the "
            f"starting weights. For this length set ema_decay={0.01 ** (1 / total):.4g} or lower."
        )
