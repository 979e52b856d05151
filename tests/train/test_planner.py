"""The plan of a training run against models and TensorFlow's graphs; micro-batches are chosen by it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.model.layers import runtime
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import memory
from keras_vit.train._recipe import Recipe, recipe
from keras_vit.train.memory import check_memory, device_memory, fewest_micro_batches, free_memory
from keras_vit.train.planner import PARTS, plan, plan_step
from marks import full_except
from official_counts import GSAM, OFFICIAL
from refusals import unrefused
from tiny_models import VARIANTS, prepared, tiny


@pytest.mark.full
@pytest.mark.parametrize("name", OFFICIAL)
def test_official_models_have_their_published_number_of_parameters(name: str) -> None:
    at_224, headless, at_384 = OFFICIAL[name]
    assert plan(name, batch_size=1).parameters == at_224
    if name in ("ViT-B_16", "R50+ViT-B_16"):
        assert count(ViTConfig.from_name(name, num_classes=0)).parameters == headless
        assert count(ViTConfig.from_name(name, image_size=384)).parameters == at_384
    if name in GSAM:
        assert count(ViTConfig.from_name(name, classifier="gap")).parameters == GSAM[name]


PUBLISHED = {"Ti/16": (1.3, 0.05), "S/16": (4.6, 0.05), "B/16": (17.56, 0.005), "L/32": (15.38, 0.005)}


@pytest.mark.full
def test_arithmetic_is_what_is_published_to_its_last_digit() -> None:
    for name, (published, half_a_digit) in PUBLISHED.items():
        assert plan(name, batch_size=1).forward_flops / 2e9 == pytest.approx(published, abs=half_a_digit), name


# TensorFlow's names of matrix products and convolutions; a plan does not count elementwise operations.
PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D")


def profiled_flops(model: VisionTransformer) -> int:
    """Return the FLOPs for one image as TensorFlow's profiler counts them in a graph that computes every token."""
    every_token = keras.Model(model.input, model.output)
    call = tf.function(lambda images: every_token(images, training=False))
    graph = call.get_concrete_function(tf.TensorSpec(prepared(model.config, batch=1).shape)).graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder(
        tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    ).with_empty_output()
    nodes, flops = [tf.compat.v1.profiler.profile(graph, cmd="op", options=options.build())], 0
    while nodes:
        node = nodes.pop()
        flops += node.float_ops if node.name in PRODUCTS else 0
        nodes.extend(node.children)
    return flops


# The profiler does not count Einsum, which computes the scores of relative positions.
@pytest.mark.parametrize(
    "variant",
    full_except(
        [
            "pure",
            "hybrid",
            "map",
            "distilled",
            "2-D positions at every block",
        ],
        [variant for variant in VARIANTS if "relative" not in variant],
    ),
)
def test_parameters_and_arithmetic_are_those_of_the_model(variant: str) -> None:
    model = VisionTransformer(tiny(**VARIANTS[variant]))
    assert count(model.config).parameters == model.count_params()
    assert plan(model.config, batch_size=1).forward_flops == profiled_flops(model)


def kept_bytes(config: ViTConfig, *, dtype: str = "float32", remat: bool = False) -> float:
    """Return the bytes per image that the forward pass computes and the gradient reads in TensorFlow's graph."""
    model = VisionTransformer(config, dtype=dtype)
    batch = 7  # no other size is a multiple of it, so it distinguishes activations from weights
    sizes: list[int] = []

    @tf.function
    def step(images: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape, runtime.random_scope(tf.constant([0, 1]), remat=remat):
            loss = tf.reduce_sum(model(images, training=True))
        forward = {operation.name for operation in graph.get_operations()}
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        backward = [operation for operation in graph.get_operations() if operation.name not in forward]
        tensors = [tensor for operation in backward if operation.type not in SHAPES for tensor in operation.inputs]
        kept = {source.ref(): source for source in map(original, tensors) if source.op.name in forward}
        kept = {key: source for key, source in kept.items() if not source.op.name.endswith(CENTRED)}
        kept.pop(images.ref(), None)  # a plan counts them separately
        sizes.extend(tensor.shape.num_elements() * tensor.dtype.size for tensor in kept.values())
        return gradients

    step.get_concrete_function(tf.TensorSpec(prepared(config, batch=batch).shape))
    return sum(size for size in sizes if size % batch == 0) / batch


SHAPES = ("Shape", "ShapeN", "ZerosLike", "OnesLike")  # these operations read no values
# TensorFlow 2.22.0rc0 keeps the centred input of each norm too: 6 % of B/16's activations, 11 % in mixed_bfloat16.
# A plan is that of the versions before; `CHOSEN_SHARE` leaves room for it.
CENTRED = "/moments/Sub"
ALIASES = ("Reshape", "Identity", "ExpandDims", "Squeeze")  # the same bytes under another shape


def original(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


LARGER = {"hidden_size": 64, "mlp_dim": 192, "image_size": 48, "num_layers": 8, "num_classes": 0}
KEPT: dict[str, dict[str, Any]] = {
    **{name: VARIANTS[name] for name in ("pure", "map", "layer scale", "relative positions")},
    "hybrid": VARIANTS["hybrid"] | {"hidden_size": 32, "image_size": 32},
    **{
        activation: {"activation": activation}
        for activation in ("gelu_erf", "gelu_quick", "silu", "hard_swish", "leaky_relu", "relu6")
    },
    "dropout": {"dropout_rate": 0.1, "attention_dropout_rate": 0.1},
}
BOTH = [(case, "float32") for case in KEPT] + [(case, "mixed_bfloat16") for case in ("pure", "hybrid", "dropout")]


QUICK = [("pure", "float32"), ("map", "float32"), ("dropout", "mixed_bfloat16")]


@pytest.mark.parametrize(("case", "dtype"), full_except(QUICK, BOTH))
def test_what_is_kept_for_the_gradient_is_about_what_tensorflows_graph_keeps(case: str, dtype: str) -> None:
    config = tiny(**LARGER | KEPT[case])
    planned = plan(config, batch_size=3, precision=dtype, xla=False).activations / 3
    # The plan has one number for all activations, and computes all tokens in the last block too.
    assert planned == pytest.approx(kept_bytes(config, dtype=dtype), rel=0.4)


@pytest.mark.full
def test_a_block_that_is_computed_again_keeps_its_input_only() -> None:
    configs = [tiny(**LARGER).replace(num_layers=layers) for layers in (1, 2)]
    planned = [plan(config, batch_size=1, remat=True, xla=False).activations for config in configs]
    kept = [kept_bytes(config, remat=True) for config in configs]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.05)  # the plan omits deviations
    # One block at a time stores everything that it would save without remat.
    assert planned[0] - kept[0] == pytest.approx(kept_bytes(configs[1]) - kept_bytes(configs[0]), rel=0.4)


def test_memory_is_counted_by_what_training_holds() -> None:
    count = plan("Ti/16", batch_size=32).parameters
    lean = plan("Ti/16", batch_size=32, optimizer="sgd", momentum_dtype="bfloat16")
    rich = plan("Ti/16", batch_size=32, optimizer="adamw", accumulation=4, ema=True, precision="mixed_bfloat16")
    assert [lean.weights, lean.gradients, lean.optimizer, lean.ema, lean.casts] == [
        4 * count,
        4 * count,
        2 * count,
        0,
        0,
    ]
    assert [rich.weights, rich.gradients, rich.optimizer] == [4 * count, 8 * count, 8 * count]
    assert [rich.ema, rich.casts] == [4 * count, 2 * count]
    assert rich.total == sum(getattr(rich, part) for part in PARTS)


def test_devices_and_micro_batches_share_the_batch_and_the_time() -> None:
    one, four = plan("Ti/16", batch_size=64), plan("Ti/16", batch_size=64, devices=2, accumulation=2)
    assert (one.micro_batch, four.micro_batch) == (64, 16)
    assert four.activations * 4 == one.activations
    assert four.images * 2 == one.images  # a device has its whole batch, though it works on half of it
    assert four.step_flops == one.step_flops
    assert one.step_flops == 3 * 64 * one.forward_flops
    plain, again = (plan("B/16", batch_size=2, remat=remat) for remat in (False, True))
    # The blocks have everything except the patch embedding (116e6 of 17.56e9 multiply-adds) and the head.
    assert again.step_flops / plain.step_flops == pytest.approx(4 / 3, rel=0.01)


def test_a_plan_prints_and_says_what_is_an_estimate() -> None:
    planned = plan("B/16", batch_size=512, devices=8, remat=True)
    for part in ("ViT-B/16 at 224x224", "86,567,656", "exact", "estimate", "activations"):
        assert part in str(planned)
    assert json.loads(json.dumps(planned.to_dict()))["total"] == planned.total


def test_what_cannot_be_planned_is_said() -> None:
    cases = [
        ({"batch_size": 100, "devices": 8}, "the nearest are [96, 104]"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 8, "devices": 1.0}, "devices must be"),
        ({"batch_size": 8, "optimizer": "adam"}, "optimizer must be"),
        ({"batch_size": 8, "precision": "float16"}, "precision must be"),
        ({"batch_size": 8, "momentum_dtype": "half"}, "momentum_dtype must be"),
        ({"batch_size": 8, "model": "ViT-X/16"}, "the nearest are"),
    ]
    assert not unrefused(lambda **asked: plan(**{"model": "Ti/16", **asked}), cases)


# ---- what the memory decides


GIB = 2**30
CONFIG = ViTConfig.from_name("B/16", image_size=384)


def finetune(**changes: Any) -> Recipe:
    return recipe("finetune", **changes)


def test_the_fewest_micro_batches_that_fit() -> None:
    cases = [(20, 1, {}), (20, 8, {}), (5, 1, {"remat": True}), (9, 1, {"batch_size": 30})]
    for gib, replicas, changes in cases:
        chosen = recipe("finetune", **changes)
        number = fewest_micro_batches(chosen, CONFIG, replicas=replicas, memory=gib * GIB)
        numbers = [n for n in range(1, number + 1) if chosen.batch_size // replicas % n == 0]
        plans = {n: plan_step(chosen.replace(accumulation=n), CONFIG, replicas=replicas) for n in numbers}
        limit = memory.CHOSEN_SHARE * gib * GIB
        assert plans.pop(number).total <= limit
        assert all(planned.total + memory.WAITING_BATCHES * planned.images > limit for planned in plans.values())
    # The first command of the readme
    numbers = [fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=gib * GIB) for gib in (8, 16, 40, 140)]
    assert numbers == [128, 64, 16, 4]
    assert fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=None) == 1


def test_one_image_that_does_not_fit_is_refused_with_figures_and_remedies() -> None:
    with pytest.raises(ValueError, match=r"one image at once of 384x384 pixels needs about 2.56 GiB .* 1.00 GiB"):
        fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=GIB)
    # The plan of a recipe that freezes variables is an upper bound.
    assert fewest_micro_batches(finetune(freeze=["block_*"]), CONFIG, replicas=1, memory=GIB) == 512
    assert memory.evaluation_batch(finetune(accumulation=8), CONFIG, replicas=1) == 64
    assert memory.evaluation_batch(finetune(accumulation=512), CONFIG, replicas=1) < 32


def test_a_stated_number_is_refused_beyond_the_error_of_plans_and_warned_of_within() -> None:
    chosen = finetune(accumulation=8)
    planned = plan_step(chosen, CONFIG, replicas=1)
    with pytest.raises(ValueError, match=r"batch of 512 with accumulation=8 .*39\.\d GiB .*accumulation='auto'"):
        check_memory(chosen, planned, memory=int(planned.total / 1.4))
    with pytest.warns(UserWarning, match="^keras_vit: A batch of 512 with accumulation=8"):
        check_memory(chosen, planned, memory=int(planned.total / 1.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(chosen, planned, memory=planned.total)
        check_memory(chosen, planned, memory=None)


# Text of files of a machine -> the bytes that are free
MACHINES: list[tuple[dict[str, str], int | None]] = [
    ({}, None),
    ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "proc/self/cgroup": ""}, 2048 * 1024),
    (  # cgroup 2: the smallest room of the group and those above; the page cache can be taken back
        {
            "proc/meminfo": "MemAvailable: 9000 kB\n",
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "5000\n",
            "sys/fs/cgroup/pod/box/memory.stat": "anon 1\ninactive_file 7\n",
            "sys/fs/cgroup/pod/memory.max": "9000\n",
            "sys/fs/cgroup/pod/memory.current": "5000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 7\n",
        },
        4007,
    ),
    (  # cgroup 1; the path is that of the host, and the container sees its own group at the top
        {
            "proc/meminfo": "MemAvailable: 9000 kB\n",
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
        },
        1001,
    ),
]


def test_free_memory_respects_the_container(tmp_path: Path) -> None:
    for number, (files, expected) in enumerate(MACHINES):
        for name, text in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert free_memory(tmp_path / str(number)) == expected


def test_the_variable_states_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_MEMORY", "1.5")
    assert device_memory(2) == 1.5 * GIB
    for wrong in ("0", "12GB", "-1", "nan"):
        monkeypatch.setenv("KERAS_VIT_MEMORY", wrong)
        with pytest.raises(ValueError, match="KERAS_VIT_MEMORY is a number of GiB above 0, such as 12. Received: "):
            device_memory(1)
    monkeypatch.delenv("KERAS_VIT_MEMORY")
    assert 0 < (device_memory(2) or 0) <= 0.6 * (device_memory(1) or 0)
