"""Write the head's layers (pooling, feature, logits; paper, equation 4), and the graph of a whole model."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from keras_vit.export.litert import dense_maps, encoder, folding, images, layers, stem
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.encoder import first_tokens, merge_heads, split_heads
from keras_vit.export.litert.folding import Affine
from keras_vit.export.litert.layers import apply_affine, mlp, norm, write_dense
from keras_vit.export.litert.operators import Operators, static_dim
from keras_vit.export.litert.plan import FilePlan, image_config
from keras_vit.export.litert.writer import FileWriter, PendingTensor, honours, source, unsupported, writes
from keras_vit.model import layers as vit
from keras_vit.model import task as tasks
from keras_vit.model.layers.tokens import EndTokenPooling

WRITERS = (dense_maps, encoder, images, layers, stem)  # importing these modules registers their writers


def build_file(model: Any, plan: FilePlan) -> Builder:
    """Build the file of a VisionTransformer, of any back end and dtype policy; the file computes in float32.

    The options that the plan follows from are checked before. The signature is "image" -> "logits", "probabilities" or
    (without a head) "features", and "attention" if asked for.
    """
    file = FileWriter(model, Operators(Builder(), plan.storage, plan.rounded, norms=plan.norms), plan)
    write_model(file)
    return file.ops.builder


def write_model(file: FileWriter) -> None:
    """Write the layers of the file's model, and its signature."""
    ops, plan, model = file.ops, file.plan, file.model
    ops.builder.description = f"{model.name}, a {type(model).__name__} by keras_vit"
    second_output = {"attention": encoder.class_attention(file)} if plan.attention else {}
    task = tasks.of_model(model)
    if isinstance(model.output, dict):
        outputs = {
            name: layers.apply_affine(ops, file.tensor_of(tensor), name) for name, tensor in model.output.items()
        }
        ops.builder.signature(file.inputs, outputs)
        return
    name = plan.output_name(task.outputs)
    output = layers.apply_affine(ops, file.tensor_of(model.outputs[0]), task.outputs[0])
    if name == "probabilities":
        is_softmax = getattr(task, "probabilities", "softmax") == "softmax"
        output = ops.softmax(output, name) if is_softmax else ops.unary("LOGISTIC", output, name)
    elif name == "classes":
        size = image_config(model).size
        whole = output if output.shape[1:3] == size else ops.resize_bilinear(output, size, "logits/enlarged")
        output = ops.cast(ops.arg_max(whole, "classes/numbers"), "uint8", name)
    if unknown := sorted({*plan.smoothing, *plan.shifts} - set(file.norms)):
        raise ValueError(f"smoothing names norms of the model: {list(file.norms)}. Received: {unknown}")
    ops.builder.signature(file.inputs, {name: output, **second_output})


# ---- the head

FEATURES = "features"  # name of the output of a model without a head


honours(keras.layers.Reshape, "target_shape")
honours(keras.layers.Concatenate)
honours(keras.layers.Average)
honours(vit.TokenPooling, "token", "num_tokens", "prefix_tokens")
honours(EndTokenPooling, "end_token")
honours(vit.AttentionPooling, "num_heads", "mlp_dim", "activation", "norm_epsilon", "prefix_tokens", "use_bias")
honours(vit.L2Normalization)


@writes(keras.layers.Reshape)
def write_reshape(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a Reshape, such as that of a ResNet's map to tokens."""
    value = file.tensor_of(x)
    if layer.target_shape[-1] != value.tensor.shape[-1]:
        value = PendingTensor(apply_affine(file.ops, value, layer.name))
    batch, *sides = value.tensor.shape
    known = math.prod(size for size in layer.target_shape if size != -1)
    size = math.prod(map(static_dim, sides)) // known
    shape = (batch, *(size if side == -1 else side for side in layer.target_shape))
    return dataclasses.replace(value, tensor=file.ops.reshape(value.tensor, shape, layer.name))


@writes(vit.TokenPooling, reads_stream=True)
def write_token_pooling(file: FileWriter, layer: Any, tokens: Any) -> PendingTensor:
    """Write one token, or the mean of the class tokens or of all patches: (batch, width)."""
    x = file.tensor_of(tokens)
    if layer.token is None:
        patches = _patches(file.ops, x.tensor, layer.prefix_tokens)
        pooled = file.ops.mean(patches, [1], layer.name, keepdims=False)
    elif layer.num_tokens > 1:
        pooled = file.ops.slice(x.tensor, 1, layer.token, layer.token + layer.num_tokens, f"{layer.name}/tokens")
        pooled = file.ops.mean(pooled, [1], layer.name, keepdims=False)
    else:
        pooled = x.tensor
        token = layer.token % static_dim(pooled.shape[1])  # -1 is the last
        if pooled.shape[1] != 1:
            pooled = file.ops.slice(pooled, 1, token, token + 1, f"pool/token_{token}")
        pooled = file.ops.reshape(pooled, (pooled.shape[0], pooled.shape[2]), f"pool/{token}")
    return dataclasses.replace(x, tensor=pooled)


@writes(EndTokenPooling)
def write_end_token_pooling(file: FileWriter, layer: Any, tokens: Any, _: Any) -> PendingTensor:
    """Write the choice of the end token's row: (batch, width)."""
    ops, name = file.ops, layer.name
    x, marks = file.tensor_of(tokens), file.inputs["ids"]
    if layer.end_token is not None:
        is_end = ops.equal(marks, ops.constant(np.array(layer.end_token, np.int32), f"{name}/end"), f"{name}/is_end")
        marks = ops.cast(is_end, "int32", f"{name}/marks")
    place = ops.arg_max(marks, f"{name}/place")
    return dataclasses.replace(x, tensor=ops.gather(x.tensor, place, name))


@writes(keras.layers.Concatenate)
def write_concatenate(file: FileWriter, layer: Any, *inputs: Any) -> PendingTensor:
    """Write features side by side; the gain and shift of a norm that all of them have are left to apply."""
    values = [file.tensor_of(x) for x in reversed(inputs)][::-1]  # in files the mean precedes the class token
    affines = [value.affine for value in values if value.affine is not None and value.norm == values[0].norm]
    if len(affines) == len(values):
        tensors = [value.tensor for value in values]
        joined = PendingTensor(
            tensors[0], Affine(*map(np.concatenate, zip(*affines, strict=True))), norm=values[0].norm
        )
    else:
        tensors = [apply_affine(file.ops, value, f"{layer.name}/{i}") for i, value in enumerate(values)]
        joined = PendingTensor(tensors[0])
    tensor = file.ops.concatenate(tensors, len(tensors[0].shape) - 1, layer.name)
    return dataclasses.replace(joined, tensor=tensor)


@writes(vit.AttentionPooling)
def write_attention_pooling(file: FileWriter, pooling: Any, tokens: Any) -> PendingTensor:
    """Write attention of a probe, which is constant, to the patches, and an MLP of the result: (batch, width)."""
    ops = file.ops
    attention = pooling.attention
    name = f"{pooling.name}/attention"
    x = file.tensor_of(tokens)
    x = dataclasses.replace(x, tensor=_patches(ops, x.tensor, pooling.prefix_tokens))
    scores = file.dense(x, folding.probe_weights(pooling), f"{name}/scores")
    batch, count, heads = scores.shape
    scores = ops.reshape(scores, (batch, 1, count, heads), f"{name}/rows")
    weights = ops.softmax(ops.transpose(scores, (0, 3, 1, 2), f"{name}/turned"), f"{name}/weights")
    value = file.dense(x, folding.dense_weights(attention.value), f"{name}/value")
    value = split_heads(ops, value, attention.num_heads, f"{name}/value")
    mixed = merge_heads(ops, ops.matmul(weights, value, f"{name}/mixed"), name)
    mixed = ops.reshape(mixed, (batch, mixed.shape[2]), f"{name}/row")
    pooled = ops.dense(mixed, *folding.dense_weights(attention.out), f"{name}/out")
    if pooling.mlp is None:
        return PendingTensor(pooled)
    normalized = norm(file, pooling.norm, PendingTensor(pooled), f"{pooling.name}/norm")
    return PendingTensor(ops.add(pooled, mlp(file, pooling.mlp, normalized, f"{pooling.name}/mlp"), pooling.name))


def num_folded_weights(model: keras.Model) -> int:
    """Count the weights that a file lacks: a probe's query and keys become one small kernel."""
    attentions = [layer.attention for layer in model.layers if isinstance(layer, vit.AttentionPooling)]
    parts = [part for layer in attentions for part in (layer.query, layer.key) if part is not None]
    return sum(math.prod(part.kernel.shape) for part in parts)


@writes(vit.L2Normalization)
def write_l2_normalization(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write x / the root of its mean square (a sum overflows half precision); the rest of the norm is left to apply."""
    ops, name = file.ops, layer.name
    feature = apply_affine(ops, file.tensor_of(x), FEATURES)
    width = static_dim(feature.shape[-1])
    square = ops.mean(ops.multiply(feature, feature, f"{name}/squares"), [-1], f"{name}/mean", keepdims=True)
    square = ops.add(square, ops.constant(np.array(1e-20, np.float32), "tiny"), f"{name}/safe")
    normalized = ops.multiply(feature, ops.unary("RSQRT", square, f"{name}/rsqrt"), name)
    return PendingTensor(normalized, Affine(np.full(width, width**-0.5), *np.zeros((2, width))))


@writes(keras.layers.Average)
def write_average(file: FileWriter, layer: Any, *inputs: Any) -> PendingTensor:
    """Write the mean of two dense layers' results, which their weights halve, or of the first tokens of a sequence."""
    sources = [source(x) for x in inputs]
    if len(inputs) == 2 and all(type(front) is keras.layers.Dense for front, _ in sources):
        first, second = (write_dense(file, dense, *read, factor=0.5).tensor for dense, read in sources)
        return PendingTensor(file.ops.add(first, second, "logits"))
    tokens = sources[0][1][0]
    if not all(_is_token(number, tokens, front, read) for number, (front, read) in enumerate(sources)):
        raise unsupported(layer, " of other layers than two dense layers or the first tokens")
    x = file.tensor_of(tokens)
    tokens = first_tokens(file.ops, x.tensor, len(inputs), "pool")
    return dataclasses.replace(x, tensor=file.ops.mean(tokens, [1], "pool", keepdims=False))


def _is_token(number: int, tokens: Any, layer: Any, inputs: list[Any]) -> bool:
    """True if a layer selects the token with this number."""
    return type(layer) is vit.TokenPooling and layer.token == number and inputs[0] is tokens


def _patches(ops: Operators, tokens: Tensor, prefix_tokens: int) -> Tensor:
    """Take the tokens of patches, which follow the prefix tokens."""
    if not prefix_tokens:
        return tokens
    return ops.slice(tokens, 1, prefix_tokens, static_dim(tokens.shape[1]), "pool/patches")
