"""The parts of a report as HTML, each with a sentence on how to read it and the section of the paper it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from keras_vit._util.page import Html, bar, section, svg, table
from keras_vit.model import cost
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import Prediction
from keras_vit.visualize.html import figures, image_sections
from keras_vit.visualize.html.inside import Inside

STYLE = """
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.charts svg, .chart svg { width: 100%; max-width: 31rem; }
@media (min-width: 62rem) {
  .side { display: grid; gap: 0 2.5rem; grid-template-columns: minmax(0, 1fr) 31rem; grid-template-rows: auto 1fr; }
  .side > .chart { grid-column: 2; grid-row: 1 / span 2; }
}
pre span { display: block; min-height: 1.5em; }
.lens th, .lens td { min-width: 8.5rem; overflow-wrap: anywhere; }
.lens th:first-child, .lens td:first-child { min-width: 3.5rem; overflow-wrap: normal; }
"""
POSITIONS = {
    "learned": "a learned position embedding",
    "learned2d": "learned position embeddings of rows and columns",
    "sincos2d": "fixed sine and cosine positions",
    "relative": "relative positions in the attention",
    "none": "no positions",
}
CLASSIFIERS = {
    "token": "the class token",
    "gap": "the mean of the patch tokens",
    "map": "attention pooling",
    "unpooled": "every patch token by itself",
    "token_unpooled": "every token by itself",
}


def describe(config: ViTConfig, parameters: int) -> str:
    """A model in one line.

    Args:
        config: of the model.
        parameters: how many numbers it has.
    """
    height, width = config.size
    rows, columns = config.grid
    kind = "Vision Transformer" if config.resnet is None else "ResNet and Vision Transformer"
    front = _in_words(["patches", *_front(config)])
    read = "the class and the distillation token" if config.distilled else CLASSIFIERS[config.classifier]
    head = f"{config.num_classes:,} classes from {read}" if config.num_classes else "no head"
    return (
        f"{kind} of {parameters:,} parameters: {_count(config.num_layers, 'block')} of "
        f"{_count(config.num_heads, 'head')}, width {config.hidden_size:,}, MLP {config.mlp_dim:,}; images of "
        f"{height} × {width} pixels as a grid of {rows} × {columns} {front}; {POSITIONS[config.position]}; "
        f"{head}; {_flops(cost.forward_flops(config))} for an image."
    )


def _front(config: ViTConfig) -> list[str]:
    """The tokens in front of the patches, in words."""
    kinds = {"a class token": config.class_token, "a distillation token": config.distilled}
    registers = [_count(config.num_registers, "register")] if config.num_registers else []
    return [kind for kind, there in kinds.items() if there] + registers


def sections(seen: Inside) -> Iterator[Html]:
    """What is said of the images, and of the model by them and by its weights.

    Args:
        seen: what was gathered.
    """
    yield image_sections.predictions(seen)
    yield image_sections.places(seen)
    yield image_sections.heads(seen)
    yield _distance(seen)
    yield _filters(seen)
    yield _similarity(seen)
    yield _tokens(seen)
    yield _lens(seen)


def card_section(card: Any) -> Html:
    """What the zoo knows of the weights.

    Args:
        card: names and values, or what says it as text, line by line.
    """
    if isinstance(card, Mapping):
        rows = [(name, value) for name, value in card.items() if value is not None]
        content = table(("what", "value"), rows, framed=False, caption="the card")
    else:
        content = Html(f"<pre>{''.join(map(_hanging, str(card).splitlines()))}</pre>")
    return section("The card", "What was published of these weights, where, and how it was measured.", content)


def _hanging(line: str) -> str:
    """A line of columns, which goes on below its last column where it is too long for the window."""
    found = re.match(r" *\S+ {2,}", line)
    indent = 0 if found is None else min(found.end(), 16)
    return f'<span style="padding-left: {indent}ch; text-indent: -{indent}ch">{escape(line)}</span>'


def export_section(exports: Sequence[Mapping[str, Any]], own_bytes: int, milliseconds: float) -> Html:
    """The model beside the files that were made of it.

    Args:
        exports: `export.Report.to_dict()` of each.
        own_bytes: of the model's weights.
        milliseconds: that it takes for an image, median.
    """
    rows: list[Sequence[Any]] = [("this model", "Keras", _bytes(own_bytes), None, None, None, f"{milliseconds:.2f}")]
    for one in exports:
        path = Path(one["path"])
        kind = "TFLite" if path.suffix == ".tflite" else "SavedModel"
        kind = kind if one.get("mode") in (None, "none") else f"{kind}, {one['mode']}"
        sqnr = "equal" if one["sqnr"] is None else f"{one['sqnr']:.1f}"
        name = path.name if path.suffix else "/".join(path.parts[-2:])
        measured = (f"{one['cosine']:.6f}", sqnr, f"{one['agreement']:.1%}", f"{one['milliseconds']:.2f}")
        rows.append((name, kind, _bytes(one["bytes"]), *measured))
    header = ("", "format", "size", "cosine", "SQNR, dB", "same best class", "ms an image")
    how = (
        "Each file beside the model it came from, as the export measured it: cosine 1, a high SQNR and 100 % mean that "
        "it says what the model says. Times are medians, of the machine that measured them; the model's own is of "
        "predict_on_batch with one image."
    )
    content = table(header, rows, right=range(2, 7), caption="exported files beside the model")
    return section("Exported files", how, content)


def _distance(seen: Inside) -> Html:
    how = (
        "A dot is a head: low dots look at neighbouring patches, high ones across the image. "
        f"Mean over {_count(len(seen.names), 'image')}, of patches to patches."
    )
    low, high = float(seen.distance.min()), float(seen.distance.max())
    alt = f"Mean attention distance of every head by block, from {low:.1f} to {high:.1f} pixels"
    source = "paper, section 4.5, figure 7 right; appendix D.7"
    return _charted("Attention distance", how, svg(figures.distances(seen.distance), alt=alt), source)


def _filters(seen: Inside) -> Html:
    what = "7 × 7 filters of the ResNet's first convolution" if seen.config.resnet else "patch embedding's filters"
    how = (
        f"The principal components of the {what}, the first ones those of the largest variance: training turns noise "
        "into smooth waves and edges."
    )
    alt = f"{len(seen.filters)} principal components of the {what}"
    source = "paper, section 4.5, figure 7 left"
    return _charted("Embedding filters", how, svg(figures.filters(seen.filters), alt=alt), source)


def _similarity(seen: Inside) -> Html:
    title, source = "Position similarity", "paper, section 4.5, figure 7 centre; appendix D.4"
    if seen.similarity is None:
        reason = "relative positions, which are no vectors" if seen.config.position == "relative" else "no positions"
        return section(title, f"Left out: this model has {reason} to compare.", "", source=source)
    how = (
        "Each small map belongs to one patch and shows how alike its position embedding is to those of all patches: "
        "bright around its own place, and along its row and column, means that the model knows where patches are."
    )
    if seen.config.position_place == "blocks":
        how += " Of the first block; every block has its own."
    rows, columns = seen.similarity.shape[:2]
    alt = f"{rows} by {columns} maps of the cosine similarity of position embeddings"
    return _charted(title, how, svg(figures.similarities(seen.similarity), alt=alt), source)


def _tokens(seen: Inside) -> Html:
    prefix, first, last = seen.config.num_prefix_tokens, seen.rank[0], seen.rank[-1]
    how = (
        "Norms: patches far above the others carry little of their own place in the image (arXiv 2309.16588). Rank: "
        "how many directions the tokens of an image fill (Roy and Vetterli 2007); near 1 all tokens say the same."
    )
    alts = (
        f"Norms of the tokens after each of {len(seen.rank)} blocks",
        f"Effective rank of the tokens, {first:.1f} after the first block, {last:.1f} after the last",
    )
    norms = svg(figures.norms(seen.norms, prefix_tokens=prefix), alt=alts[0])
    ranks = svg(figures.ranks(seen.rank), alt=alts[1])
    content = f'<div class="charts">{norms}{ranks}</div>'
    return section("The tokens, block by block", how, content, source="not in the paper")


def _lens(seen: Inside) -> Html:
    title, source = "Logit lens", "not in the paper; the head of section 3.1, applied after every block"
    if seen.leaders is None:
        return section(title, "Left out: this model has no head.", "", source=source)
    how = (
        "The class that would lead if the model ended after a block; in bold where it is the one that leads at the end."
    )
    final = [one.label_id for one in seen.leaders[-1]]
    rows = [
        (str(block), *(_leader(one, one.label_id == last) for one, last in zip(leaders, final, strict=True)))
        for block, leaders in enumerate(seen.leaders, start=1)
    ]
    content = table(("block", *seen.names), rows, caption="leading class after each block, by image")
    return section(title, how, f'<div class="lens">{content}</div>', source=source)


def _leader(one: Prediction, final: bool) -> Html:
    label = escape(one.label.partition(",")[0])  # ImageNet's labels are lists of synonyms
    return bar(Html(f"<strong>{label}</strong>" if final else label) + f" {one.probability:.0%}", one.probability)


def _charted(title: str, how: str, chart: Html, source: str) -> Html:
    """A section of one chart, which stands beside the words where there is room."""
    return section(title, how, f'<div class="chart">{chart}</div>', source=source, kind="side")


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _flops(count: int) -> str:
    return f"{count / 1e9:,.1f} GFLOP" if count >= 1e9 else f"{count / 1e6:,.1f} MFLOP"


def _in_words(things: Sequence[str]) -> str:
    return " and ".join([", ".join(things[:-1]), things[-1]]) if len(things) > 1 else things[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
