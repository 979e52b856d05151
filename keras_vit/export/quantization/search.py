"""Find the operators that lose most by fixed ranges of 8 bits, or by kernels of 4 bits, and give them more.

A layer with one range for all channels of its output loses the small channels beside a large one. Where the output goes
to the residual stream, factors of the channels make up for it. What is still lost is measured operator by operator: an
emulation (see `emulation`) rounds the tensors of one of them at a time. Errors of different tensors are independent, so
their powers add up, and the worst are taken out until the rest is small enough.

Kernels of 4 bits are measured layer by layer, too, in the float32 file. They are rounded to the nearest there: what
GPTQ leaves on the very images that it looks at is too small, by more in some layers than in others.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_vit._util.progress import track
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.emit import write_model
from keras_vit.export.litert.folding import Array
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.storage import FLOAT32
from keras_vit.export.litert.writer import FileWriter
from keras_vit.export.quantization.calibration import FileGraph, Operator, check_images, observe, spread
from keras_vit.export.quantization.emulation import MOVES, STEPS, Emulation, RoundingBuilder, outputs
from keras_vit.export.quantization.modes import FLOAT, WITH_KERNELS, Mode, Rule
from keras_vit.export.quantization.outliers import on_grid
from keras_vit.export.quantization.quantize import Ranges, measure_ranges

# Multiply-adds that the search may take, 15 s on two cores: it uses as many images as that allows, of these.
BUDGET = 1.5e12
MOST_IMAGES, LEAST_IMAGES = 16, 4
NUM_FACTOR_IMAGES = 8  # factors depend on the largest values alone, which few images show
GAIN = 4.0  # least quotient of the noise without and with factors, for which they are worth a multiplication
QUIET = 0.5  # share of the weights whose blocks grow from 32 to 64 inputs, if other layers get 8 bits
SIXTEEN_BITS = {"ADD", "SUB", "MUL", "BATCH_MATMUL", "SOFTMAX", "MEAN", "SUM", "RSQRT", "GELU"}


class Found(NamedTuple):
    """Result of a search."""

    options: Options  # with factors
    mode: Mode  # with rules for the operators found
    noise: float  # of what is left
    shares: dict[str, float]  # name of an operator or of some alike -> its noise, the largest first
    chosen: tuple[str, ...]  # those that got other ranges

    def lines(self) -> tuple[str, ...]:
        """Return lines of a report."""
        assert self.mode.search is not None
        if not self.shares:
            return ("the search for operators that lose most needs two images with different outputs",)
        got = {None: "kernels of 8 bits", 16: "16 bits", FLOAT: "ranges at run time"}[self.mode.search.activations]
        cause = "nearest rounding to 4 bits" if self.mode.search.activations is None else "fixed ranges"
        chosen = ", ".join(self.chosen) or "none"
        worst = ", ".join(f"{name} {noise:.1e}" for name, noise in list(self.shares.items())[:5])
        return (
            f"{got}: {len(self.chosen)} of {len(self.shares)}: {chosen}",
            f"noise of {cause} {self.noise:.1e}, of which: {worst}",
        )


class _Candidate(NamedTuple):
    """Operators that get other ranges together."""

    name: str
    tensors: frozenset[str]  # that need no rounding then
    operators: frozenset[str]  # names
    cost: float  # as a share of all


def search(model: Any, options: Options, mode: Mode, images: np.ndarray, work: Path, *, progress: bool) -> Found:
    """Return options and mode of a file that loses at most `mode.search.noise`, if its budget allows.

    Args:
        model: a VisionTransformer.
        options: of the file.
        mode: with `search`.
        images: calibration images as the file takes them.
        work: path of a file that is overwritten.
        progress: whether to show progress bars.
    """
    parameters = mode.search
    assert parameters is not None
    single = dataclasses.replace(options, batch=1, attention=False, storage=FLOAT32)
    if parameters.activations is None:
        return _search_kernels(_write(model, single, Builder(), work), options, mode, images, progress=progress)
    graph = FileGraph.read(np.memmap(_write(model, single, Builder(), work), np.uint8, "r"))
    images = check_images(graph, images, mode.name)
    factors = _output_factors(graph, work, mode, images, progress=progress)
    single = dataclasses.replace(single, output_factors=factors)
    graph = FileGraph.read(np.memmap(_write(model, single, Builder(), work), np.uint8, "r"))
    ranges = measure_ranges(work, graph, images, progress=progress)
    candidates = list(_candidates(graph, mode))
    builder = RoundingBuilder(mode=mode)
    _write(model, single, builder, work)
    emulation = Emulation(work, {**_steps(ranges), **builder.fixed_steps})
    shown = _some_images(graph, len(candidates), images)
    exact = emulation.run(shown, ())
    if not _differ(exact):
        return Found(options, mode, 0.0, {}, ())

    def noise(tensors: Iterable[str]) -> float:
        return _noise(emulation.run(shown, tensors), exact)

    noises = {one: noise(one.tensors) for one in track(candidates, "Searching", show=progress)}
    others = set(emulation.tensors).difference(*(one.tensors for one in candidates))
    chosen = _choose(noises, parameters.noise - noise(others), parameters.share)
    spared = frozenset[str]().union(*(one.tensors for one in chosen))
    operators = frozenset[str]().union(*(one.operators for one in chosen))
    kept = {name: values for name, values in factors.items() if name not in operators}
    return Found(
        dataclasses.replace(options, output_factors=kept),
        dataclasses.replace(mode, rules=(*mode.rules, *_rules(operators, parameters.activations))),
        noise(set(emulation.tensors) - spared),
        _sorted_shares(noises),
        tuple(one.name for one in candidates if one in chosen),
    )


def _search_kernels(source: Path, options: Options, mode: Mode, images: np.ndarray, *, progress: bool) -> Found:
    """Return a mode in which the dense layers that kernels of 4 bits hurt most have 8; see `search`.

    The layers that lose least get larger blocks, which make up for the bytes of some others.
    """
    parameters = mode.search
    assert parameters is not None
    content = np.fromfile(source, np.uint8)
    graph = FileGraph.read(content)
    images = check_images(graph, images, mode.name)
    layers = {graph.name(one): one for one in graph.operators if one.kind == "FULLY_CONNECTED"}
    storages = {name: mode.storage_of(one.kind, name) for name, one in layers.items()}
    kernels = {name: graph.kernel(layers[name]) for name, storage in storages.items() if storage.bits == 4}
    candidates = list(_kernel_candidates(kernels))
    shown = _some_images(graph, len(candidates), images)
    exact = _outputs(content, graph, shown)
    if not _differ(exact):
        return Found(options, mode, 0.0, {}, ())
    noises = {}
    for one in track(candidates, "Searching", show=progress):
        own = {name: kernels[name].copy() for name in one.operators}
        for name in own:
            kernels[name][...] = storages[name].rounded(own[name]).floats()
        noises[one] = _noise(_outputs(content, graph, shown), exact)
        for name, kernel in own.items():
            kernels[name][...] = kernel
    chosen = _choose(noises, parameters.noise, parameters.share)
    names = frozenset[str]().union(*(one.operators for one in chosen))
    quiet = {name for one in _quietest(noises) for name in one.operators if storages[name].block == 32} - names
    dense, rules = ("FULLY_CONNECTED",), list(mode.rules)
    if names:
        rules.append(Rule(operators=dense, names=_pattern(names), weights=8, method="gptq"))
    if names and quiet:
        rules.append(Rule(operators=dense, names=_pattern(quiet), weights=4, block=64, method="gptq"))
    mode = dataclasses.replace(mode, rules=tuple(rules))
    return Found(
        dataclasses.replace(options, storage=mode),
        mode,
        sum(noise for one, noise in noises.items() if one not in chosen),
        _sorted_shares(noises),
        tuple(one.name for one in candidates if one in chosen),
    )


def _kernel_candidates(kernels: Mapping[str, np.ndarray]) -> Iterator[_Candidate]:
    """Yield dense layers, queries and keys together; the costs are numbers of weights."""
    groups: dict[str, list[str]] = {}
    for name in kernels:
        groups.setdefault(re.sub(r"/(query|key)$", "/query and key", name), []).append(name)
    total = sum(kernel.size for kernel in kernels.values())
    for group, names in groups.items():
        cost = sum(kernels[name].size for name in names) / total
        yield _Candidate(group, frozenset(), frozenset(names), cost)


def _outputs(content: np.ndarray, graph: FileGraph, images: np.ndarray) -> np.ndarray:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content.tobytes(), num_threads=2)
    interpreter.allocate_tensors()
    return outputs(interpreter, graph.image, images)


def _differ(exact: np.ndarray) -> bool:
    return len(exact) > 1 and bool(exact.var(axis=0).sum() > 0)


def _noise(received: np.ndarray, exact: np.ndarray) -> float:
    """Return the power of the errors as a share of the power of the differences between images."""
    return float((received - exact).var(axis=0, ddof=1).sum() / exact.var(axis=0, ddof=1).sum())


def _sorted_shares(noises: Mapping[_Candidate, float]) -> dict[str, float]:
    return {one.name: noise for one, noise in sorted(noises.items(), key=lambda item: -item[1])}


def _write(model: Any, options: Options, builder: Builder, path: Path) -> Path:
    write_model(FileWriter(model, Operators(builder, options.storage), options))
    path.unlink(missing_ok=True)  # a graph that was read still has views of the old file
    builder.write(path)
    return path


def _output_factors(
    graph: FileGraph, path: Path, mode: Mode, images: np.ndarray, *, progress: bool
) -> dict[str, Array]:
    """Return `Options.output_factors` for the layers with fixed ranges of 8 bits that gain by them."""
    names = {
        graph.name(operator)
        for operator in graph.operators
        if _bits(mode, graph, operator) == 8 and re.search(r"^embedding$|/(out|dense2)$", graph.name(operator))
    }
    maxima: dict[str, Array] = {}

    def update(name: str, values: np.ndarray) -> None:
        largest = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0).astype(np.float64)
        maxima[name] = np.maximum(maxima.get(name, 0), largest)

    observe(path, graph, spread(images, NUM_FACTOR_IMAGES), update, names=names, progress=progress)
    return {
        name: 1 / on_grid(values)
        for name, values in maxima.items()
        if values.max() ** 2 > GAIN * np.square(values).mean() > 0
    }


def _bits(mode: Mode, graph: FileGraph, operator: Operator) -> int:
    rule = mode.rule(operator.kind, graph.name(operator))
    return FLOAT if rule is None else rule.activations


def _steps(ranges: Ranges) -> dict[str, float]:
    """Return the steps of 8 bits of ranges, which have 0 in them."""
    return {
        name: float((max(row["max"].item(), 0) - min(row["min"].item(), 0)) / STEPS or 1)
        for name, row in ranges.items()
    }


def _some_images(graph: FileGraph, runs: int, images: np.ndarray) -> np.ndarray:
    """Return as many images as the budget allows in so many runs."""
    per_image = sum(_multiply_adds(graph, operator) for operator in graph.operators if operator.kind in WITH_KERNELS)
    return spread(images, max(LEAST_IMAGES, min(MOST_IMAGES, int(BUDGET / max(runs * per_image, 1)))))


def _multiply_adds(graph: FileGraph, operator: Operator) -> float:
    """Return the multiply-adds of a dense layer or a convolution for an image."""
    kernel = graph.kernel(operator).shape
    return float(np.prod(graph.tensors[operator.outputs[0]].shape[1:-1]) * np.prod(kernel))


def _candidates(graph: FileGraph, mode: Mode) -> Iterator[_Candidate]:
    assert mode.search is not None
    operators = [operator for operator in graph.operators if _bits(mode, graph, operator) == 8]
    if mode.search.activations == FLOAT:
        yield from _layer_candidates(graph, operators)
    else:
        yield from _tensor_candidates(graph, operators)


def _layer_candidates(graph: FileGraph, operators: list[Operator]) -> Iterator[_Candidate]:
    """Yield the dense layers and convolutions that read the same tensor; the costs are multiply-adds."""
    layers: dict[str, list[Operator]] = {}
    for operator in operators:
        if operator.kind in WITH_KERNELS:
            layers.setdefault(graph.input_name(operator), []).append(operator)
    total = sum(_multiply_adds(graph, operator) for operator in operators if operator.kind in WITH_KERNELS)
    for source, readers in layers.items():
        names = frozenset(map(graph.name, readers))
        cost = sum(_multiply_adds(graph, reader) for reader in readers) / total
        yield _Candidate(" and ".join(sorted(names)), names | {source}, names, cost)


def _tensor_candidates(graph: FileGraph, operators: list[Operator]) -> Iterator[_Candidate]:
    """Yield the tensors of the same name in all blocks; the costs are numbers of values.

    A tensor has 16 bits where the operator that computes it and all that read it have 16 bits, but for layers with
    kernels, which read it in 8 bits anyway.
    """
    eight_bits = set(operators)
    readers: dict[int, list[Operator]] = {}
    for operator in operators:
        for tensor in operator.inputs:
            readers.setdefault(tensor, []).append(operator)
    roles: dict[str, list[Operator]] = {}
    for operator in operators:
        if operator.kind in SIXTEEN_BITS and any(o.kind not in WITH_KERNELS for o in _final_readers(operator, readers)):
            roles.setdefault(re.sub(r"\d+", "*", graph.name(operator)), []).append(operator)
    total = sum(np.prod(graph.tensors[o.outputs[0]].shape) for o in operators if o.kind not in MOVES)
    for role, writers in roles.items():
        together = {operator for writer in writers for operator in (writer, *_all_readers(writer, readers))}
        names = frozenset(graph.name(o) for o in together & eight_bits if o.kind in SIXTEEN_BITS | MOVES)
        cost = float(sum(np.prod(graph.tensors[o.outputs[0]].shape) for o in writers) / total)
        yield _Candidate(role, frozenset(map(graph.name, writers)), names, cost)


def _all_readers(operator: Operator, readers: Mapping[int, list[Operator]]) -> Iterator[Operator]:
    """Yield the operators that read a result, also behind operators that only move its values, and these."""
    for reader in readers.get(operator.outputs[0], []):
        yield reader
        if reader.kind in MOVES:
            yield from _all_readers(reader, readers)


def _final_readers(operator: Operator, readers: Mapping[int, list[Operator]]) -> Iterator[Operator]:
    return (reader for reader in _all_readers(operator, readers) if reader.kind not in MOVES)


def _choose(noises: Mapping[_Candidate, float], most: float, share: float) -> set[_Candidate]:
    """Return the candidates with the most noise for their cost, until the others have less than `most`."""
    chosen: set[_Candidate] = set()
    for one in sorted(noises, key=lambda one: noises[one] / one.cost, reverse=True):
        if sum(noise for other, noise in noises.items() if other not in chosen) <= most:
            break
        if sum(other.cost for other in chosen) + one.cost <= share:
            chosen.add(one)
    return chosen


def _quietest(noises: Mapping[_Candidate, float]) -> Iterator[_Candidate]:
    """Yield the candidates with the least noise for their cost, as many as have the share `QUIET` of all."""
    left = QUIET
    for one in sorted(noises, key=lambda one: noises[one] / one.cost):
        left -= one.cost
        if left < 0:
            return
        yield one


def _rules(operators: Iterable[str], activations: Literal[16, 32]) -> tuple[Rule, ...]:
    """Return a rule for operators by their names."""
    if not operators:
        return ()
    return (Rule(operators=("*",), names=_pattern(operators), weights=8, activations=activations),)


def _pattern(names: Iterable[str]) -> str:
    """Return a regular expression that fits these names alone."""
    return f"^({'|'.join(map(re.escape, sorted(names)))});"
