"""Find the model in a file, whatever programs wrote around it: one rule for all formats and files.

A format fits at a place if its marks stand there. What stands before the names of the model's own program is taken off:
keys of nested dicts ("state_dict/"), modules around the model ("module.", "student.backbone."), or both. Where several
models stand, the file's own program decides, or the caller's `which`.
"""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from keras_vit._util import files
from keras_vit.converters.containers import Container
from keras_vit.converters.table import Table
from keras_vit.errors import CheckpointError

# Modules that programs put between the names of a model: torch.compile, FSDP, activation checkpointing, peft.
_MODULES = r"(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|modules_to_save\.\w+)\.)"
_INSERTED = re.compile(rf"(?<![^./]){_MODULES}")
_REPLACED = ".original_module."  # what peft keeps beside its modules_to_save, and does not use
# Moments of an optimizer of JAX have the names of the weights; those of flax before optax stand beside the weights.
_MOMENTS = re.compile(r"(^|/)(opt|opt_state|optimizer|optimizer_state)/(?!target/)")
# Keys under which one file has several sets of weights, in the order in which its program looks for them.
_ORDERS = {
    # timm 1.0.31, models/_helpers.py, load_state_dict with use_ema=True, its default.
    "timm": ("state_dict_ema", "model_ema", "state_dict", "model"),
    # Lightning, pytorch/callbacks/weight_averaging.py, on_save_checkpoint: state_dict has the averages.
    "Lightning": ("state_dict", "current_model_state"),
    # big_vision, utils.py, load_params: with optax, and before it.
    "big_vision": ("params", "opt"),
}
# Keys of averages of the weights (EMA), for which="ema" and "raw"; and those of the raw weights of programs that keep
# the averages under the usual key. ema_state_dict is in neither: mmengine's EMAHook keeps the raw weights there, others
# the averages.
_AVERAGES = {"state_dict_ema", "model_ema", "ema_model", "ema"}
_RAW = {"current_model_state"}


class Place(NamedTuple):
    """A place in a file at which a format fits."""

    table: Table
    path: str  # all that stands before the format's marks: "state_dict/module.vit."

    @property
    def prefix(self) -> str:
        """The part of the path that the format's own program writes: "vit."."""
        own = [name for name in self.table.names.own_prefixes if re.search(rf"(^|[./]){re.escape(name)}$", self.path)]
        return max(own, key=len, default="")

    @property
    def wrapper(self) -> str:
        """The part of the path that other programs wrote: "state_dict/module."."""
        return self.path.removesuffix(self.prefix)

    @property
    def keys(self) -> list[str]:
        """The keys and modules of the path."""
        return re.split("[./]", self.path.rstrip("./"))


class FoundModel(NamedTuple):
    """A model that was found in a file; the file's container now has its tensors alone, by their own names."""

    table: Table
    prefix: str  # what its own program writes before most names
    other_parts: list[str]  # names of the file's tensors beside the model
    told: str  # what was taken off and chosen; "" for a file as its own program writes it


def find_model(
    container: Container, tables: Sequence[Table], which: str | None = None, *, is_format_known: bool = False
) -> FoundModel:
    """Find the one model of these formats in an open file, and take off what stands around it.

    `which` is "ema", "raw", or a key or module under which the model stands. Raise a CheckpointError, which lists what
    the file holds, unless there is exactly one model, or the caller or the file's program chooses one.
    """
    names, inserted = _drop_inserted(container)
    places = _find_places(container, names, tables)
    if not places and is_format_known and which is None:  # errors of the tensors say more
        container.select(names)
        return FoundModel(tables[0], "", [], "")
    place, reason = _choose(container, places, which)
    start = _start_in_file(place, names)
    inside = {name.removeprefix(place.wrapper): stored for name, stored in names.items() if stored.startswith(start)}
    beside = [_relative(name, place.path) for name, stored in names.items() if not stored.startswith(start)]
    container.select(inside)
    removed = ", ".join(repr(name) for name in (place.wrapper, *inserted) if name)
    told = [f"the names of its tensors are read without {removed}"] if removed else []
    return FoundModel(place.table, place.prefix, beside, "; ".join([*reason, *told]))


def find_formats(container: Container, tables: Iterable[Table]) -> list[str]:
    """List the formats that fit at some place in an open file."""
    names, _ = _drop_inserted(container)
    return sorted({place.table.format for place in _find_places(container, names, tables)})


def _find_places(container: Container, names: Mapping[str, str], tables: Iterable[Table]) -> list[Place]:
    shapes = {short: container.headers[name].shape for short, name in names.items()}
    fitting: dict[str, list[Table]] = collections.defaultdict(list)
    for table in tables:
        for path in table.find_places(shapes):
            fitting[path].append(table)
    places = [Place(table, path) for path, found in fitting.items() for table in _narrowest(found)]
    return [place for place in places if not _MOMENTS.search(place.wrapper)]


def _narrowest(tables: Sequence[Table]) -> list[Table]:
    """Leave out each format that fits at the same place as one with all of its marks, and more."""
    marks = [{*table.detect, *table.detect_several} for table in tables]
    return [table for table, own in zip(tables, marks, strict=True) if not any(other > own for other in marks)]


def _drop_inserted(container: Container) -> tuple[dict[str, str], list[str]]:
    """Map the names without inserted modules to the names of a file's tensors, and list these modules."""
    inserted: dict[str, None] = {}
    names: dict[str, str] = {}
    has_saved = any(".modules_to_save." in name for name in container.headers)
    for name in container.headers:
        if has_saved and _REPLACED in name:
            continue
        inserted |= dict.fromkeys(_INSERTED.findall(name))
        short = _INSERTED.sub("", name)
        if short in names:
            raise CheckpointError(f"{container.path} has two tensors for {short}: {names[short]} and {name}")
        names[short] = name
    return names, list(inserted)


def _start_in_file(place: Place, names: Mapping[str, str]) -> str:
    """Find the wrapper as it stands in the file, with modules that were inserted: "model._orig_mod."."""
    marks = {f"{place.path}{mark}" for mark in place.table.detect[0].split(" | ")}
    stored = next(names[name] for name in names if place.table.names.spell(name) in marks)
    parts = map(re.escape, re.findall(r"[^./]*[./]", place.wrapper))
    return re.match(f"{_MODULES}*".join(["", *parts, ""]), stored)[0]  # type: ignore[index]


def _relative(name: str, path: str) -> str:
    """Take off what a name has in common with the path of the model, key by key."""
    while not name.startswith(path):
        path = path[: max(path[:-1].rfind("."), path[:-1].rfind("/")) + 1]
    return name[len(path) :]


def _choose(container: Container, places: Sequence[Place], which: str | None) -> tuple[Place, list[str]]:
    """Choose a place, and say in words why it was chosen among several."""
    if not places:
        raise CheckpointError(f"{container.path}: {_unknown(container)}")
    named = [place for place in places if which is None or _is_named(place, which, places)]
    paths = dict.fromkeys(place.path for place in named)
    reason: list[str] = []
    if len(paths) > 1 and (program := _program_of(named)):
        order = _ORDERS[program]
        named = [min(named, key=lambda place: order.index(place.keys[0]))]
        others = [path for path in paths if path != named[0].path]
        reason = [
            f"{_listed([named[0].path])} is read, as {program} does, and not {_listed(others)}: choose with which= "
            "(--which), the key of one, 'ema' or 'raw'"
        ]
        paths = {named[0].path: None}
    if len(paths) != 1:
        found = f"has {len(paths)} models" if paths else f"has no model for which={which!r:.200}, but"
        raise CheckpointError(
            f"{container.path} {found} under {_listed(paths or [place.path for place in places])}: choose with which= "
            "(--which), the key of one, or 'ema' or 'raw' where one is the average of the other"
        )
    if len(named) > 1:
        formats = [place.table.format for place in named]
        raise CheckpointError(
            f"{container.path}: more than one format ({formats}) is known by its tensors. format= takes one of them"
        )
    return named[0], reason


def _listed(paths: Iterable[str]) -> str:
    names = [repr(path.rstrip("./")) if path else "the top of the file" for path in dict.fromkeys(paths)]
    return " and ".join(names[:10] + ["others"] * (len(names) > 10))


def _program_of(places: Sequence[Place]) -> str | None:
    """Find the program whose order has the keys of all places, a place for each."""
    keys = [place.keys[0] for place in places if "/" in place.path]
    is_told = len({*keys}) == len(places)
    return next((name for name, order in _ORDERS.items() if is_told and {*keys} <= {*order}), None)


def _is_named(place: Place, which: str, places: Sequence[Place]) -> bool:
    """Check whether a caller's `which` names a place: its path, "ema" or "raw", or keys of its path in sequence."""
    wanted = which.rstrip("./")
    if any(other.path.rstrip("./") == wanted for other in places):
        return place.path.rstrip("./") == wanted
    if wanted in ("ema", "raw") and not any(wanted in other.keys for other in places):
        raw = [other for other in places if _RAW & {*other.keys}]
        averages = [other for other in places if _AVERAGES & {*other.keys}] if not raw else []
        is_raw = place in raw if raw else place not in averages
        return bool(raw or averages) and is_raw == (wanted == "raw")
    return f"/{'/'.join(re.split('[./]', wanted))}/" in f"/{'/'.join(place.keys)}/"


def _unknown(container: Container) -> str:
    """Describe a file without a model of a known format."""
    names = sorted(container.headers)
    what = "no format is known by its tensors"
    for family, patterns in files.read_toml(files.data_folder("converters") / "other_families.toml").items():
        if all(any(re.search(pattern, name) for name in names) for pattern in patterns):
            what = f"its tensors are those of {family}. This package does not have it"
            break
    groups = collections.Counter(re.match(r"[^./]*[./]?", name)[0] for name in names)  # type: ignore[index]
    listed = ", ".join(f"{group} ({count})" for group, count in groups.most_common(20))
    return (
        f"{what}. Received {len(names)} tensors: {str(names[:3])[:200]}; by their first key: {listed[:500]}. format= "
        "takes a name of keras_vit.converters.formats() or a .toml table of your own; model.load_weights reads what "
        "model.save_weights wrote"
    )
