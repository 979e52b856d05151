"""The counts of a config agree with TensorFlow's allocations and the sizes of exported files."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import export, zoo
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.model.numbers import fingerprint, numbers, path
from keras_vit.model.parts import PRECISIONS
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.zoo._numbers import published_configs
from marks import full_except
from tiny_models import FAMILIES, VARIANTS, prepared, tiny

MODES = {"float32": "none", "float16": "float16", "int8": "dynamic"}


@pytest.mark.parametrize("variant", VARIANTS | FAMILIES)
def test_every_variant_has_parts_with_names_and_shapes(variant: str) -> None:
    config = tiny(**(VARIANTS | FAMILIES)[variant])
    parts = count(config).parts
    assert all(part.name and min(part.output) > 0 for part in parts)


@pytest.mark.parametrize("variant", VARIANTS | FAMILIES)
def test_the_last_part_gives_what_the_model_gives(variant: str) -> None:
    model = VisionTransformer(tiny(**(VARIANTS | FAMILIES)[variant]))
    # The class token is not counted separately: without a head the output is the first row of the norm.
    expected = {"headless": (17, 32)}.get(variant, model.output_shape[1:])
    assert count(model.config).parts[-1].output == expected


def one_after_another(graph: tf.Graph, fetched: str) -> tf.compat.v1.GraphDef:
    """Return a graph optimized by TensorFlow, whose operations may run in one order only (each operand, then its user).

    TensorFlow chooses among independent operations by what happens to be ready, on a busy machine another one each
    time, and what waits keeps its memory.
    """
    from tensorflow.python.grappler import tf_optimizer

    exported = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    exported.collection_def["train_op"].node_list.value.append(fetched)
    optimized = tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), exported)
    nodes = {node.name: node for node in optimized.node}
    ordered, waiting = dict[str, None](), [fetched]
    while waiting:
        operands = [name.lstrip("^").partition(":")[0] for name in nodes[waiting[-1]].input]
        missing = [name for name in operands if name not in ordered]
        if missing:
            waiting.append(missing[0])
        else:
            ordered.setdefault(waiting.pop())
    computed = [name for name in ordered if nodes[name].op not in ("Const", "Placeholder")]
    for before, after in itertools.pairwise(computed):
        nodes[after].input.append(f"^{before}")
    return tf.compat.v1.GraphDef(node=[nodes[name] for name in ordered], library=optimized.library)


def allocated(config: ViTConfig) -> int:
    """Return the peak bytes of TensorFlow's allocator while a frozen model computes one image."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    images = prepared(config, batch=1)
    model = VisionTransformer(config)
    call = tf.function(lambda x: model(x, training=False)).get_concrete_function(tf.TensorSpec(images.shape))
    frozen = convert_variables_to_constants_v2(call)
    fetched, fed = frozen.outputs[0].name, {frozen.inputs[0].name: images}
    v1 = tf.compat.v1
    one_by_one = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    one_by_one.graph_options.rewrite_options.disable_meta_optimizer = True
    record, options = v1.RunMetadata(), v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    with tf.Graph().as_default(), v1.Session(config=one_by_one) as session:
        tf.import_graph_def(one_after_another(frozen.graph, frozen.outputs[0].op.name), name="")
        session.run(fetched, fed)  # memory that is allocated once is no activation
        session.run(fetched, fed, options=options, run_metadata=record)
    nodes = [node for device in record.step_stats.dev_stats for node in device.node_stats]
    events = [event for node in nodes for memory in node.memory for event in memory.allocation_records]
    changes = [event.alloc_bytes for event in sorted(events, key=lambda event: (event.alloc_micros, event.alloc_bytes))]
    return int(np.cumsum(changes).max()) + images.nbytes  # the image belongs to the caller


SMALL = {"num_layers": 2, "num_classes": 10}
RUN: dict[str, dict[str, Any]] = {
    "Ti/16": {},
    "Ti/16 at 384x224": {"image_size": (384, 224)},
    "Ti/8": {"image_size": 160},
    "Ti/16, relu": {"activation": "relu"},
    "Ti/16, relative": {"position": "relative", "position_place": "shared"},
    "Ti/16, unpooled": {"classifier": "unpooled", "num_classes": 5000},
    "R+Ti/16": {},
    "R26+S/32": {"image_size": 128},
}


@pytest.mark.parametrize("case", full_except(["Ti/16", "R+Ti/16"], RUN))
def test_memory_is_what_tensorflow_allocates(case: str) -> None:
    config = ViTConfig.from_name(case.replace(" ", ",").partition(",")[0], **{**SMALL, **RUN[case]})
    # The count leaves out one number for each token (means, deviations) and a row for the head: at most 0.4 %.
    # Relative scores depend on neither keys nor values: in this order both are computed before the scores.
    tensors = 4 * config.num_tokens * config.hidden_size * (2 if config.position == "relative" else 0)
    # Where attention is the peak: the workspace for the keys of a product, 34,304 on a processor with AVX-512.
    packed = 35_000 if config.activation == "relu" else 0
    measured = allocated(config)
    assert count(config).activation_bytes == pytest.approx(measured, abs=0.01 * measured + tensors + packed)


# A file also has its graph with names: 19 to 21 kB here, 48 kB in a hybrid with float16 kernels. The class
# token's float16 kernels in the last block of an int8 file are 8 kB more than int8 ones, and their operators 2 kB.
GRAPH = 15_000, 35_000


@pytest.mark.parametrize("precision", PRECISIONS)
def test_file_sizes_are_those_of_exported_files(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    model = zoo.load("digits")
    made = export.tflite(model, tmp_path / "digits.tflite", quantize=MODES[precision])
    least, most = GRAPH
    assert least < made.bytes - count(model.config).file_bytes(precision) < most


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"precision must be one of \['float32', 'float16', 'int8'\]. Received: 'int4'"
    ):
        count(ViTConfig()).file_bytes("int4")


@functools.cache
def kept() -> dict[str, ViTConfig]:
    """Return the configs whose numbers are kept with the cards, by fingerprint."""
    return {fingerprint(config): config for config in published_configs()}


def test_the_numbers_of_every_card_are_kept() -> None:
    stored = json.loads(path().read_text(encoding="utf-8"))
    assert sorted(stored) == sorted(kept()), "run `make numbers`"


@pytest.mark.parametrize("name", full_except(sorted(kept())[::8], kept()))
def test_kept_numbers_are_those_of_the_model(name: str) -> None:
    config = kept()[name]
    assert numbers(config) == count(config), "run `make numbers`"
