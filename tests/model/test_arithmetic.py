"""The counts of a config agree with TensorFlow's allocations and the sizes of exported files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import export, train, zoo
from keras_vit.model import cost, layers
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count, symbolic_model
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.model.vit import Network
from marks import full_except
from tiny_models import FAMILIES, VARIANTS, prepared, tiny

MODES = {"float32": "none", "float16": "float16", "int8": "dynamic"}


@pytest.mark.full
def test_every_variant_has_parts_and_the_last_gives_what_the_model_gives() -> None:
    received, expected = {}, {}
    for variant, changes in (VARIANTS | FAMILIES).items():
        config = tiny(**changes)
        parts = count(config).parts
        assert all(part.name and min(part.output) > 0 for part in parts), variant
        received[variant] = parts[-1].output
        expected[variant] = symbolic_model(config).output_shape[1:]
    # The class token is not counted separately: without a head the output is the first row of the norm.
    assert received == expected | {"headless": (17, 32)}


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
    "Ti/8": {"image_size": 160},
    "Ti/16, relative": {"position": "relative", "position_place": "shared"},
    "R+Ti/16": {},
}


@pytest.mark.parametrize("case", full_except(["Ti/16"], RUN))
def test_memory_is_what_tensorflow_allocates(case: str) -> None:
    config = ViTConfig.from_name(case.replace(" ", ",").partition(",")[0], **{**SMALL, **RUN[case]})
    # The count leaves out one number for each token (means, deviations) and a row for the head: at most 0.4 %.
    # Relative scores depend on neither keys nor values: in this order both are computed before the scores.
    tensors = 4 * config.num_tokens * config.hidden_size * (2 if config.position == "relative" else 0)
    measured = allocated(config)
    assert count(config).activation_bytes == pytest.approx(measured, abs=0.01 * measured + tensors)


# A file also has its graph with names: 19 to 21 kB here, 48 kB in a hybrid with float16 kernels. The class
# token's float16 kernels in the last block of an int8 file are 8 kB more than int8 ones, and their operators 2 kB.
GRAPH = 15_000, 35_000


def test_file_sizes_are_those_of_exported_files(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    model = zoo.load("digits")
    least, most = GRAPH
    for precision, mode in MODES.items():
        made = export.tflite(model, tmp_path / f"{mode}.tflite", quantize=mode)
        assert least < made.bytes - count(model.config).file_bytes[precision] < most, precision


# ---- what is not known


def test_an_unknown_layer_with_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gain(keras.layers.Identity):
        def build(self, input_shape: tuple[Any, ...]) -> None:
            self.gain = self.add_weight(shape=(input_shape[-1],), name="gain")

    monkeypatch.setattr(Network, "_norm", lambda self, name: Gain(name=name))
    with pytest.raises(TypeError, match=r"encoder_norm \(Gain, 48 parameters\)"):
        train.plan(tiny(hidden_size=48), batch_size=1)


def test_weights_that_no_part_has_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    build = layers.EncoderBlock.build

    def build_with_another_norm(self: layers.EncoderBlock, input_shape: tuple[Any, ...]) -> None:
        build(self, input_shape)
        self.norm3 = layers.LayerNormalization(name="norm3")
        self.norm3.build(input_shape)

    monkeypatch.setattr(layers.EncoderBlock, "build", build_with_another_norm)
    with pytest.raises(TypeError, match="none of its parts"):
        train.plan(tiny(hidden_size=56), batch_size=1)


def test_a_new_field_of_a_config_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "FIELDS", cost.FIELDS.replace("gated_mlp", "").replace("stage_widths", ""))
    with pytest.raises(TypeError, match=r"\['ViTConfig.gated_mlp', 'ResNetConfig.stage_widths'\]"):
        train.plan(tiny(hidden_size=64), batch_size=1)
