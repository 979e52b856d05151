"""Write the LiteRT graph of a VisionTransformer or a TextEncoder directly from its weights."""

from typing import Any

from keras_vit.export.litert import dense_maps, encoder, head, images, layers, stem
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options, image_config
from keras_vit.export.litert.writer import FileWriter
from keras_vit.model import task as tasks

WRITERS = (
    images,
    layers,
    encoder,
    encoder,
    stem,
    head,
    dense_maps,
    dense_maps,
)  # importing these modules registers their writers


def build_file(model: Any, options: Options) -> Builder:
    """Build the file of a VisionTransformer, of any back end and dtype policy; the file computes in float32.

    `options` are checked before. The signature is "image" -> "logits", "probabilities" or (without a head) "features",
    and "attention" if asked for.
    """
    file = FileWriter(model, Operators(Builder(), options.storage, options.rounded, norms=options.norms), options)
    write_model(file)
    return file.ops.builder


def write_model(file: FileWriter) -> None:
    """Write the layers of the file's model, and its signature."""
    ops, options, model = file.ops, file.options, file.model
    ops.builder.description = f"{model.name}, a {type(model).__name__} by keras_vit"
    second_output = {"attention": encoder.class_attention(file)} if options.attention else {}
    task = tasks.of_model(model)
    name = options.output_name(task.outputs)
    output = layers.apply_affine(ops, file.read(model.outputs[0]), task.outputs[0])
    if name == "probabilities":
        is_softmax = getattr(task, "probabilities", "softmax") == "softmax"
        output = ops.softmax(output, name) if is_softmax else ops.unary("LOGISTIC", output, name)
    elif name == "classes":
        size = image_config(model).size
        whole = output if output.shape[1:3] == size else ops.resize_bilinear(output, size, "logits/enlarged")
        output = ops.cast(ops.arg_max(whole, "classes/numbers"), "uint8", name)
    if unknown := sorted({*options.smoothing, *options.shifts} - set(file.norms)):
        raise ValueError(f"smoothing names norms of the model: {list(file.norms)}. Received: {unknown}")
    ops.builder.signature(file.inputs, {name: output, **second_output})
