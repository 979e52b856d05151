"""One model of the gallery: its architecture, and all that is known of each of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from keras_vit._util.checks import pair
from keras_vit.model.config import ViTConfig
from keras_vit.zoo.cards import NOT_PUBLISHED
from keras_vit.zoo.gallery.entries import MIB, Entry


def card(entries: Sequence[Entry]) -> str:
    """The card of a model.

    Args:
        entries: of its weights, the recommended ones first.

    Returns:
        an <article> that can be linked to by the entries' `model_anchor`, and in it a <section> for each entry's
        `anchor`.
    """
    first = entries[0]
    anchor = escape(first.model_anchor)
    return (
        f'<article class="card" id="{anchor}" aria-labelledby="{anchor}.name" tabindex="-1">'
        f'<h3 id="{anchor}.name">{escape(first.name)}</h3><p class="what">{escape(architecture(first.config))}</p>'
        f"{''.join(map(_weights, entries))}</article>"
    )


def architecture(config: ViTConfig) -> str:
    """What a model is made of, in a sentence; what its weights decide is left out."""
    height, width = config.stride
    patch = f"{height} px" if height == width else f"{height} x {width} px"
    stem = "Patches"
    if config.resnet:
        units = sum(config.resnet.num_layers)
        stem = f"A ResNet of {units} units, tokens" if units else "The stem of a ResNet, tokens"
    return (
        f"{stem} of {patch}; {config.num_layers} blocks, {config.hidden_size:,} wide, with {config.num_heads} heads "
        f"and an MLP of {config.mlp_dim:,}."
    )


def _weights(entry: Entry) -> str:
    badge = ' <span class="badge">default</span>' if entry.default else ""
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in _facts(entry))
    notes = "".join(f"<li>{escape(note)}</li>" for note in entry.weights.notes)
    return (
        f'<section class="weights" id="{escape(entry.anchor)}"><h4>{escape(entry.weights.tag)}{badge}</h4>'
        f'<div class="load"><code>{escape(entry.load)}</code></div><dl>{rows}</dl>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}</section>"
    )


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    """Name and HTML of each line."""
    weights = entry.weights
    yield "Accuracy", _accuracy(entry)
    labels = f" ({escape(weights.labels)})" if weights.labels else ""
    height, width = pair(weights.image_size, "image_size")
    yield "Image", f"{height} x {width} px, {escape(_prepared(entry))}"
    yield "Classes", weights.classes_words + labels
    yield "Parameters", f"{entry.parameters:,}"
    yield "GFLOPs", f"{entry.gflops:,.2f} for an image of {height} px (a multiply-add counts as two)"
    stored = (f"{_mib(size)} with {kind} kernels" for kind, size in entry.stored.items())
    yield "Weights take", f"about {', '.join(stored)}"
    yield "File", f"<code>{escape(weights.url or weights.base + weights.file)}</code>"
    yield "File size", weights.size_words
    yield "SHA-256", f"<code>{weights.sha256}</code>" if weights.sha256 else NOT_PUBLISHED
    yield "Converts to", _formats(entry)
    arxiv = escape(weights.paper.arxiv)
    yield "Paper", f'{escape(weights.paper.title)} (<a href="https://arxiv.org/abs/{arxiv}">arXiv {arxiv}</a>)'
    yield "Licence", f"{escape(weights.licence)}; {escape(weights.source)}"


def _accuracy(entry: Entry) -> str:
    if not entry.weights.accuracy:
        return "none is published"
    reported = (
        f"<li><strong>{accuracy.value:g} %</strong> {escape(accuracy.metric)}, {escape(accuracy.dataset)} at "
        f'{accuracy.image_size} px <span class="source">{escape(accuracy.source)}</span></li>'
        for accuracy in entry.weights.accuracy
    )
    return f"<ul>{''.join(reported)}</ul>"


def _prepared(entry: Entry) -> str:
    """How an image is brought to the size."""
    how = entry.weights.preprocessing
    way = "both sides scaled" if how.resize == "squash" else f"centre crop of {how.crop_fraction:g}"
    return f"{way}, {how.interpolation}{', antialiased' if how.antialias else ''}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.{1 if size < 10 * MIB else 0}f} MiB"


def _formats(entry: Entry) -> str:
    exact = [escape(name) for name, same in entry.formats.items() if same]
    close = [escape(name) for name, same in entry.formats.items() if not same]
    remark = " (other readers' logits differ in the fourth digit or so)"
    return ", ".join([*exact, *[f"{name}{remark}" for name in close]]) or "no other format"
