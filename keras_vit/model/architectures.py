"""Official architectures by name: ViT, hybrids, MLP-Mixer and BiT."""

import re
from typing import Any

from keras_vit._util import files
from keras_vit._util.text import nearest

# The rows of zoo/sizes/papers.toml, which says what their numbers are.
_PAPERS = files.read_toml(files.data_folder("zoo") / "sizes" / "papers.toml")
SIZES: dict[str, list[int]] = _PAPERS["vit"]
HYBRIDS = {name: (tuple(units), patch) for name, (units, patch) in _PAPERS["hybrid"].items()}

_VIT_FIELDS = ("hidden_size", "mlp_dim", "num_heads", "num_layers")
_MIXER_FIELDS = ("hidden_size", "mlp_dim", "tokens_mlp_dim", "num_layers")
OTHERS: dict[str, dict[str, Any]] = {  # name -> fields of ViTConfig
    f"Mixer-{size}/{patch}": dict(zip(_MIXER_FIELDS, row, strict=True), patch_size=patch) | _PAPERS["mixer_fields"]
    for size, row in _PAPERS["mixer"].items()
    for patch in (8, 14, 16, 32)
}
OTHERS |= {
    f"BiT-R{depth}x{width}": {
        **_PAPERS["bit_fields"],
        "hidden_size": 2048 * width,
        "resnet": {**_PAPERS["bit_resnet_fields"], "num_layers": tuple(units), "width_factor": float(width)},
    }
    for depth, units in _PAPERS["bit"].items()
    for width in (1, 2, 3, 4)
}


def canonical_name(name: str) -> str:
    """Find the canonical spelling of an architecture's name: "ViT-B/16" for "b_16", "B16" or "vit-b/16".

    Any case and separators are accepted. Case matters only for sizes that differ in nothing else (g and G).
    """
    for other in OTHERS:
        if re.sub(r"[-_/ ]", "", other).casefold() == re.sub(r"[-_/ ]", "", name).casefold():
            return other
    match = re.fullmatch(
        r"(?:(R\d*)[+_\- ]*)??(?:ViT[-_ ]*)?([A-Z]+(?:400m)?(?:[-_ ]?opt)?)[/_\- ]?(\d+)", name.strip(), re.I
    )
    if match:
        stem, size, patch = match.groups()
        known_size = _known_size(re.sub(r"[-_ ]?opt$", "-opt", size, flags=re.I))
        if known_size and int(patch) > 0:
            canonical = f"{stem.upper()}+" if stem else ""
            canonical += f"ViT-{known_size}/{int(patch)}"
            if not stem or canonical in HYBRIDS:
                return canonical
    examples = [f"ViT-{size}/{patch}" for size in SIZES for patch in (8, 14, 16, 32)] + list(HYBRIDS)
    near = nearest(name, [*examples, *OTHERS], count=4, cutoff=0)
    raise ValueError(f"No architecture has this name; the nearest are {near}. Received: {name!r:.200}")


def _known_size(size: str) -> str | None:
    same = [known for known in SIZES if known.lower() == size.lower()]
    return size if size in SIZES else same[0] if len(same) == 1 else None


def architecture_fields(name: str) -> dict[str, Any]:
    """Look up the fields of ViTConfig for an architecture's name; "resnet" of a hybrid is a dict."""
    canonical = canonical_name(name)
    if canonical in OTHERS:
        return dict(OTHERS[canonical])
    stem, _, vit = canonical.rpartition("+")
    size, patch = vit.removeprefix("ViT-").split("/")
    fields: dict[str, Any] = dict(zip(_VIT_FIELDS, SIZES[size], strict=True), patch_size=int(patch))
    fields["dropout_rate"] = _PAPERS["dropout"].get(canonical, 0.0)
    if stem:
        units, fields["patch_size"] = HYBRIDS[canonical]
        fields["resnet"] = {"num_layers": units}
    return fields


def name_of(config: Any) -> str:
    """Name a ViTConfig's architecture, such as "ViT-B/16", or its size if the papers do not name it."""
    wanted = config.to_dict()
    units = config.resnet and (config.resnet.version, config.resnet.num_layers)
    names = [f"ViT-{size}/{config.patch_size[0]}" for size in SIZES]
    for name in (*names, *HYBRIDS) if config.has_attention else OTHERS:
        fields = {**architecture_fields(name), "dropout_rate": config.dropout_rate}
        resnet, patch = fields.pop("resnet", None), fields.pop("patch_size")
        same_resnet = units == (resnet and (resnet.get("version", 1), resnet["num_layers"]))
        if tuple(config.patch_size) == (patch, patch) and same_resnet and fields.items() <= wanted.items():
            return name
    kind = "Vision Transformer" if config.has_attention else "MLP-Mixer" if config.tokens_mlp_dim else "ResNet"
    return f"{kind}, {config.num_layers or sum(config.resnet.num_layers)} blocks of width {config.hidden_size}"
