"""Accuracy against arithmetic as SVG: a logarithmic axis to the right, every dot a link to its card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from keras_vit.zoo.gallery.entries import Entry, Point

# Of a dot's middle, in units of the drawing; the shape tells the series where the colour does not.
MARKS = (
    '<circle r="5.5"/>',
    '<rect x="-5" y="-5" width="10" height="10"/>',
    '<path d="M0-6.5 6 5H-6z"/>',
    '<path d="M0-7 7 0 0 7-7 0z"/>',
)
COLOURS = 6  # that the style sheet has: .series-0 ...
LETTER, LINE = 7.2, 14  # the most that a letter of a name takes on average at 12 px, and a line


@dataclass(frozen=True)
class Box:
    """A rectangle of the drawing, in its units, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether they have a point in common."""
        return not (
            self.right <= other.left or other.right <= self.left or self.bottom <= other.top or other.bottom <= self.top
        )


@dataclass(frozen=True)
class Scales:
    """Where numbers lie in a drawing.

    Attributes:
        area: inside of the axes.
        gflops: least and most; both above 0.
        accuracy: least and most, percent.
    """

    area: Box
    gflops: tuple[float, float]
    accuracy: tuple[float, float]

    def x(self, gflops: float) -> float:
        """How far to the right."""
        low, high = map(math.log, self.gflops)
        return self.area.left + (self.area.right - self.area.left) * (math.log(gflops) - low) / (high - low)

    def y(self, accuracy: float) -> float:
        """How far down."""
        low, high = self.accuracy
        return self.area.bottom - (self.area.bottom - self.area.top) * (accuracy - low) / (high - low)


def series(entries: Sequence[Entry]) -> list[str]:
    """The tags of the weights that the plot shows, each a series of its own, in the order of the entries."""
    return list(dict.fromkeys(entry.weights.tag for entry in entries if entry.point))


def mark(number: int | None, *, hollow: bool = False) -> str:
    """The sign of a series around (0, 0), hollow for a hybrid; of None a plain dot that is no series'."""
    kind = "hollow" if hollow else "filled"
    colour = "plain" if number is None else f"series-{number % COLOURS}"
    return f'<g class="mark {colour} {kind}">{MARKS[(number or 0) % len(MARKS)]}</g>'


def drawing(entries: Sequence[Entry], *, width: int, height: int, css_class: str) -> str:
    """The plot.

    Args:
        entries: those without a `point` are left out.
        width, height: of the drawing, in units that are pixels where it is shown as large.
        css_class: of the <svg>.

    Returns:
        one <svg> element; of no points an empty text.
    """
    points = [(entry, entry.point) for entry in entries if entry.point]
    if not points:
        return ""
    flops = [point.gflops for _, point in points]
    values = [point.accuracy.value for _, point in points]
    step = _step(max(values) - min(values))
    least, most = math.floor(min(values) / step - 0.25), math.ceil(max(values) / step + 0.25)
    scales = Scales(
        area=Box(46, 12, width - 12, height - 46),
        gflops=(min(flops) / 1.4, max(flops) * 1.4),
        accuracy=(step * least, step * most),
    )
    order = series(entries)
    dots = [_dot(entry, point, scales, order.index(entry.weights.tag)) for entry, point in points]
    label = "ImageNet-1k top-1 accuracy against GFLOPs an image, a point for each file of weights"
    return (
        f'<svg class="plot {css_class}" viewBox="0 0 {width} {height}" role="group" aria-label="{label}">'
        f"{_axes(scales, step)}{_labels(points, scales)}{''.join(dots)}</svg>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis, 1, 2 and 5 times powers of ten, between two positive numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [round_ for ten in decades for digit in (1, 2, 5) if low <= (round_ := digit * 10.0**ten) <= high]


def _step(span: float) -> float:
    """A round distance between lines so that there are about five."""
    rough = max(span, 1.0) / 5
    ten = 10 ** math.floor(math.log10(rough))
    return min((digit * ten for digit in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def _axes(scales: Scales, step: float) -> str:
    area, (low, high) = scales.area, scales.accuracy
    parts = []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = scales.y(value)
        parts.append(f'<path class="grid" d="M{area.left} {y:.1f}H{area.right}"/>')
        parts.append(f'<text class="tick" x="{area.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(*scales.gflops):
        x = scales.x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {area.top}V{area.bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{area.bottom + 18}" text-anchor="middle">{value:g}</text>')
    middle = (area.left + area.right) / 2
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{area.bottom + 38}" text-anchor="middle">'
        "GFLOPs an image (logarithmic)</text>"
    )
    height = (area.top + area.bottom) / 2
    parts.append(
        f'<text class="axis" x="12" y="{height:.1f}" text-anchor="middle" transform="rotate(-90 12 {height:.1f})">'
        "top-1 accuracy, %</text>"
    )
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def _dot(entry: Entry, point: Point, scales: Scales, number: int) -> str:
    accuracy = point.accuracy
    title = (
        f"{entry.name}, {entry.weights.tag}: {accuracy.value:g} % at {accuracy.image_size} px, "
        f"{point.gflops:,.1f} GFLOPs. {accuracy.source}"
    )
    place = f"translate({scales.x(point.gflops):.1f} {scales.y(accuracy.value):.1f})"
    return (
        f'<a class="dot" href="#{escape(entry.anchor)}" aria-label="{escape(title)}" transform="{place}">'
        f'<title>{escape(title)}</title><circle class="reach" r="11"/>{mark(number, hollow=entry.hybrid)}</a>'
    )


def _labels(points: Sequence[tuple[Entry, Point]], scales: Scales) -> str:
    """The names beside the dots, as many as there is room for: none covers a dot or another."""
    middles = [(scales.x(point.gflops), scales.y(point.accuracy.value)) for _, point in points]
    taken = [Box(x - 7, y - 7, x + 7, y + 7) for x, y in middles]
    parts = []
    for (entry, _), (x, y) in zip(points, middles, strict=True):
        text = entry.name.replace("ViT-", "")
        for anchor, box in _places(x, y, LETTER * len(text)):
            inside = scales.area.left < box.left and box.right < scales.area.right and box.top > scales.area.top
            if inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                at = {"start": box.left, "middle": x, "end": box.right}[anchor]
                place = f'x="{at:.1f}" y="{box.bottom - 3.5:.1f}" text-anchor="{anchor}"'
                parts.append(f'<text class="label" {place}>{escape(text)}</text>')
                break
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def _places(x: float, y: float, width: float) -> list[tuple[str, Box]]:
    """Where a label may stand: right of its dot, left, above, below, then askew; with the end that is fixed there."""
    corners = [
        ("start", x + 9, y - LINE / 2),
        ("end", x - 9 - width, y - LINE / 2),
        ("middle", x - width / 2, y - 9 - LINE),
        ("middle", x - width / 2, y + 9),
        ("start", x + 7, y - 6 - LINE),
        ("start", x + 7, y + 6),
        ("end", x - 7 - width, y - 6 - LINE),
        ("end", x - 7 - width, y + 6),
    ]
    return [(anchor, Box(left, top, left + width, top + LINE)) for anchor, left, top in corners]
