"""Lay out the plot of accuracy against FLOPs; templates/plot.svg draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from entries import Entry, Point

# Upper bound of a letter's mean width and height of a line, for the labels' 12 px.
LETTER_WIDTH, LINE_HEIGHT = 7.2, 14


class Box(NamedTuple):
    """A rectangle of the drawing, in its units; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Return whether the rectangles overlap; rectangles that only touch do not."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Dot(NamedTuple):
    """An entry in the plot; `series` is the index of its family."""

    entry: Entry
    point: Point
    x: float
    y: float
    series: int


class Label(NamedTuple):
    """A model's name near its dot; `anchor` is the part of the text that is at x: start, middle or end."""

    text: str
    x: float
    y: float
    anchor: str


class Plot(NamedTuple):
    """Positions of all elements of a plot, in pixels of the full-size drawing."""

    width: int
    height: int
    area: Box  # between the axes
    rows: list[tuple[float, float]]  # accuracy and y of each horizontal line
    columns: list[tuple[float, float]]  # GFLOPs and x of each vertical line
    series: list[str]  # families
    dots: list[Dot]
    labels: list[Label]  # as many names as there is room for


def layout(entries: Sequence[Entry], *, width: int, height: int) -> Plot:
    """Return a plot of the given size; at least one entry has a `point`, and those without are left out."""
    points = [(entry, entry.point) for entry in entries if entry.point]
    flops = [point.gflops for _, point in points]
    values = [point.accuracy.value for _, point in points]
    area = Box(46, 12, width - 12, height - 46)
    lowest, highest = min(flops) / 1.4, max(flops) * 1.4
    step = _line_distance(max(values) - min(values))
    lines = range(math.floor(min(values) / step - 0.25), math.ceil(max(values) / step + 0.25) + 1)

    def x_of(gflops: float) -> float:
        return area.left + (area.right - area.left) * math.log(gflops / lowest) / math.log(highest / lowest)

    def y_of(accuracy: float) -> float:
        return area.bottom - (area.bottom - area.top) * (accuracy / step - lines[0]) / (lines[-1] - lines[0])

    series = list(dict.fromkeys(entry.family for entry, _ in points))
    dots = [
        Dot(entry, point, x_of(point.gflops), y_of(point.accuracy.value), series.index(entry.family))
        for entry, point in points
    ]
    return Plot(
        width=width,
        height=height,
        area=area,
        rows=[(step * line, y_of(step * line)) for line in lines],
        columns=[(tick, x_of(tick)) for tick in ticks(lowest, highest)],
        series=series,
        dots=dots,
        labels=list(_labels(dots, area)),
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive numbers: 1, 2 and 5 times powers of ten, or fewer of a wide range."""
    digits = (1, 2, 5) if high / low < 1000 else (1, 3)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for decade in decades for digit in digits if low <= (tick := digit * 10.0**decade) <= high]


def _line_distance(span: float) -> float:
    """Return a round distance between lines that gives about five of them."""
    rough = max(span, 1.0) / 5
    power = 10 ** math.floor(math.log10(rough))
    return min((digit * power for digit in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def _labels(dots: Sequence[Dot], area: Box) -> Iterator[Label]:
    """Yield a label for each dot that has room for one: no label covers a dot or another label."""
    taken = [Box(dot.x - 7, dot.y - 7, dot.x + 7, dot.y + 7) for dot in dots]
    for dot in dots:
        text = dot.entry.name.replace("ViT-", "")
        for anchor, box in _places(dot.x, dot.y, LETTER_WIDTH * len(text)):
            is_inside = area.left < box.left and box.right < area.right and box.top > area.top
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                x = {"start": box.left, "middle": dot.x, "end": box.right}[anchor]
                yield Label(text, x, box.bottom - 3.5, anchor)
                break


def _places(x: float, y: float, width: float) -> list[tuple[str, Box]]:
    """Return the anchor and box of a dot's possible labels: right, left, above, below, then the four corners."""
    corners = [
        ("start", x + 9, y - LINE_HEIGHT / 2),
        ("end", x - 9 - width, y - LINE_HEIGHT / 2),
        ("middle", x - width / 2, y - 9 - LINE_HEIGHT),
        ("middle", x - width / 2, y + 9),
        ("start", x + 7, y - 6 - LINE_HEIGHT),
        ("start", x + 7, y + 6),
        ("end", x - 7 - width, y - 6 - LINE_HEIGHT),
        ("end", x - 7 - width, y + 6),
    ]
    return [(anchor, Box(left, top, left + width, top + LINE_HEIGHT)) for anchor, left, top in corners]
