"""The gallery has the right content, escapes all text, and works in headless Chromium."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from headless_browser import Page, served
from html_document import Document
from keras_vit import zoo
from keras_vit.converters import expressible
from test_format_matrix import FORMATS, MODELS, PROPERTIES
from tiny_models import VARIANTS, tiny

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
sys.path.insert(0, str(GALLERY))

import page as gallery  # noqa: E402
import plot  # noqa: E402
from entries import Entry, entries  # noqa: E402
from page import COLUMNS, document  # noqa: E402

ENTRIES = entries()
TEXT = document(ENTRIES)
MEASURED = [entry for entry in ENTRIES if entry.point]


@pytest.mark.full
def test_the_page_is_one_file_and_leaves_others_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "site"
    path = gallery.write(folder)
    assert path == folder / "index.html"
    (folder / "notes.txt").write_text("mine")
    path.write_text("old")
    assert gallery.write(folder).read_text("utf-8") == TEXT
    assert {file.name for file in folder.iterdir()} == {"index.html", "notes.txt"}
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.full
def test_the_script_writes_it(tmp_path: Path) -> None:
    script = [sys.executable, str(GALLERY / "page.py"), str(tmp_path / "site")]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'site' / 'index.html'}\n"
    assert (tmp_path / "site" / "index.html").read_text("utf-8") == TEXT


def test_every_file_of_every_card_is_there_with_all_that_is_known() -> None:
    assert len(ENTRIES) == sum(len(zoo.card(name).weights) for name in zoo.names()) > 40
    for entry in ENTRIES:
        card = TEXT.partition(f'id="{entry.anchor}"')[2].partition("</section>")[0]
        weights = entry.weights
        known = [weights.file, weights.paper.title, weights.licence, weights.source, entry.load, *weights.notes]
        known += [weights.sha256 or "not published", f"{entry.parameters:,}", weights.labels or ""]
        known += [
            text for one in weights.accuracy for text in (f"{one.value:g} %", one.source, one.dataset, one.metric)
        ]
        assert [text for text in known if escape(text) not in card] == []


def test_the_first_row_is_the_model_that_the_readme_recommends() -> None:
    assert f"Take `{ENTRIES[0].name}` for a first try" in (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    assert ENTRIES[0].is_default
    rest = [name for name in zoo.names() if name != ENTRIES[0].name]
    assert [name for name, _ in itertools.groupby(entry.name for entry in ENTRIES)] == [ENTRIES[0].name, *rest]


def test_references_meet_and_nothing_is_fetched() -> None:
    page = Document(TEXT)
    names = page.values("id")
    assert len(names) == len(set(names))
    targets = page.values("href")
    assert {target.removeprefix("#") for target in targets if target.startswith("#")} <= set(names)
    others = {target for target in targets if not target.startswith("#")}
    assert all(target.startswith("https://arxiv.org/abs/") for target in others)
    assert not page.values("src")
    assert "url(" not in TEXT
    labelled = {name for value in page.values("aria-labelledby") for name in value.split()}
    assert labelled <= set(names)


def test_the_lines_to_copy_are_python_that_names_the_weights() -> None:
    assert next(entry for entry in ENTRIES if entry.name == "ViT-digits").load == "keras_vit.zoo.load('ViT-digits')"
    for entry in ENTRIES:
        name, *tag = re.findall("'([^']+)'", entry.load)
        assert zoo.card(name).weights[tag[0] if tag else zoo.card(name).default] == entry.weights


def test_what_a_card_says_is_text_and_never_markup() -> None:
    bad = "\"'><b id=x>&</script>"
    weights = dataclasses.replace(ENTRIES[0].weights, architecture=bad, tag=bad, file=bad, labels=bad, notes=(bad,))
    weights = dataclasses.replace(weights, licence=bad, source=bad, paper=type(weights.paper)(title=bad, arxiv=bad))
    reported = [dataclasses.replace(MEASURED[0].weights.accuracy[0], source=bad)]
    hostile = dataclasses.replace(ENTRIES[0], weights=dataclasses.replace(weights, accuracy=tuple(reported)), load=bad)
    text = document([hostile])
    assert "<b id" not in text
    assert text.count("</script>") == 1
    assert not Document(text).all("b")


def test_a_page_without_accuracies_has_no_plot() -> None:
    assert "<figure>" not in document([entry for entry in ENTRIES if not entry.point])


@pytest.mark.parametrize(
    ("name", "tag", "value", "size"),
    [
        ("ViT-B/16", "augreg-imagenet21k+imagenet2012", 85.49, 384),
        ("ViT-B/16", "imagenet21k+imagenet2012-224", 81.2, 224),
        ("ViT-B/32", "sam", 73.704, 224),
        ("ViT-B/16", "imagenet21k", None, None),  # of other files, fine-tuned from this one
        ("ViT-digits", "digits", None, None),  # of another data set
    ],
)
def test_only_top_1_of_the_file_itself_on_imagenet_1k_is_ranked(
    name: str, tag: str, value: float | None, size: int | None
) -> None:
    [entry] = [entry for entry in ENTRIES if (entry.name, entry.weights.tag) == (name, tag)]
    point = entry.point
    assert (point and point.accuracy.value, point and point.accuracy.image_size) == (value, size)


def test_arithmetic_is_that_of_the_size_the_accuracy_was_measured_at() -> None:
    entry = next(entry for entry in MEASURED if (entry.name, entry.weights.image_size) == ("ViT-B/16", 384))
    assert entry.point is not None
    assert entry.point.gflops == pytest.approx(entry.gflops)
    elsewhere = dataclasses.replace(entry.weights.accuracy[0], image_size=224)
    moved = dataclasses.replace(entry, weights=dataclasses.replace(entry.weights, accuracy=(elsewhere,)))
    assert moved.point is not None
    assert moved.gflops == entry.gflops
    # timm 1.0 prints 17.6 GMACs for vit_base_patch16_224; a multiply-add counts as two here.
    assert moved.point.gflops == pytest.approx(2 * 17.6, rel=0.01)


def test_dots_lie_where_their_numbers_say() -> None:
    template = "{% from 'plot.svg' import drawing %}{{ drawing(plot, 'any') }}"
    layout = plot.layout(ENTRIES, width=1000, height=400)
    drawn = gallery._templates().from_string(template).render(plot=layout)
    found = re.findall(r'class="dot" href="#([^"]+)".*?translate\(([\d.]+) ([\d.]+)\)', drawn)
    assert [name for name, _, _ in found] == [entry.anchor for entry in MEASURED]
    places = {name: (float(x), float(y)) for name, x, y in found}
    grid = re.findall(r'<text class="tick" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([\d.]+)<', drawn)
    across = {float(text): float(x) for x, _, anchor, text in grid if anchor == "middle"}
    up = {float(text): float(y) - 4 for _, y, anchor, text in grid if anchor == "end"}
    decade = across[100] - across[10]
    lines = sorted(up)
    for entry in MEASURED:
        x, y = places[entry.anchor]
        # Coordinates are rounded to 0.1 of some 270 units a decade and 28 a line.
        assert entry.point and 10 ** (1 + (x - across[10]) / decade) == pytest.approx(entry.point.gflops, rel=3e-3)
        part = (up[lines[0]] - y) / (up[lines[0]] - up[lines[-1]])
        assert lines[0] + part * (lines[-1] - lines[0]) == pytest.approx(entry.point.accuracy.value, abs=0.03)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1, 10, [1, 2, 5, 10]),
        (3, 400, [5, 10, 20, 50, 100, 200]),
        (0.04, 0.3, [0.05, 0.1, 0.2]),
        (6, 9, []),
    ],
)
def test_ticks_are_round_numbers_inside_the_axis(low: float, high: float, wanted: list[float]) -> None:
    assert plot.ticks(low, high) == pytest.approx(wanted)


@pytest.mark.parametrize("case", PROPERTIES)
def test_formats_are_those_that_save_writes(case: str) -> None:
    # tests/test_format_matrix.py saves these models in each format; here the config alone decides.
    verdicts = dict(zip(FORMATS, map(str.strip, MODELS[case].split("|")), strict=True))
    wanted = {name: verdict == "yes" for name, verdict in verdicts.items() if verdict in ("yes", "told")}
    found = expressible.formats_of(tiny(**PROPERTIES[case]))
    assert {name: found[name] for name in FORMATS if name in found} == wanted


@pytest.mark.parametrize(
    ("variant", "wanted"),
    [
        ("pure", {"big_vision": True, "google": True, "huggingface": True, "timm": True}),
        ("hybrid", {"google": True, "timm": False}),
        ("stem only", {"google": True, "timm": False}),
        ("gap", {"big_vision": True, "google": True, "huggingface_siglip": True, "timm": True}),
        ("representation", {"big_vision": True, "google": True}),
        ("layer scale", {"timm": True}),
        ("sincos", {"big_vision": True}),
    ],
)
def test_formats_of_the_kinds_of_models_in_the_zoo(variant: str, wanted: dict[str, bool]) -> None:
    assert expressible.formats_of(tiny(**VARIANTS[variant])) == wanted


# In a browser.

browser = pytest.mark.browser
WIDTHS = {"desktop": 1280, "tablet": 768, "phone": 390}
SHOWN = "[...document.querySelectorAll('#catalogue tbody tr')].filter((row) => row.checkVisibility())"
NAMES = f"{SHOWN}.map((row) => row.dataset.for)"
UNKNOWN = float("inf")  # behind everything
KEYS: dict[str, Callable[[Entry], Any]] = {
    "Model": lambda entry: entry.rank,
    "Weights": lambda entry: entry.weights.tag,
    "Image": lambda entry: entry.weights.image_size,
    "Parameters": lambda entry: entry.parameters,
    "GFLOPs": lambda entry: entry.gflops,
    "ImageNet-1k top-1": lambda entry: entry.point.accuracy.value if entry.point else None,
    "File": lambda entry: entry.file_bytes,
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    gallery.write(folder)
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(window: Page, address: str) -> Iterator[Page]:
    """Open the gallery in a new wide window; any output on its console is an error."""
    window.resize(WIDTHS["desktop"])
    load(window, address)
    yield window
    assert not window.console


def load(page: Page, address: str) -> None:
    page.open("about:blank")
    page.open(address)
    page.until("document.documentElement?.classList.contains('scripted')")


def press(page: Page, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


def enter(page: Page, text: str) -> None:
    """Replace the text in the search field."""
    page.evaluate("document.getElementById('search').select()")
    page.call("Input.insertText", text=text) if text else press(page, "Backspace", 8)


def ordered(column: str, *, descending: bool = False) -> list[str]:
    """Return the anchors sorted by a column: unknown values last, equal ones in the order of the catalogue."""
    key = KEYS[column]
    known = sorted((entry for entry in ENTRIES if key(entry) is not None), key=key, reverse=descending)
    return [entry.anchor for entry in [*known, *(entry for entry in ENTRIES if key(entry) is None)]]


@browser
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", lambda entry: True),
        ("vit-b_16", lambda entry: entry.name.endswith("ViT-B/16")),
        ("  SAM   b/32 ", lambda entry: "sam" in entry.weights.tag and entry.name.endswith("B/32")),  # gsam too
        ("surrogate gap", lambda entry: entry.weights.tag == "gsam" and entry.family == "ViT"),
        ("2106.10270 r50", lambda entry: entry.name.startswith("R50") and "augreg" in entry.weights.tag),
        ("huggingface", lambda entry: "huggingface" in " ".join([*entry.formats, entry.weights.source])),
        ("no such model", lambda entry: False),
    ],
)
def test_search_finds_the_rows_with_all_its_words(page: Page, words: str, wanted: Callable[[Entry], bool]) -> None:
    enter(page, words)
    found = [entry.anchor for entry in ENTRIES if wanted(entry)]
    assert page.evaluate(NAMES) == found
    said = page.evaluate("document.getElementById('count').textContent")
    everything = f"{len(ENTRIES)} files"
    assert said == (
        everything if not words else f"{len(found)} of {everything}" if found else "No file fits the search."
    )
    drawn = "[...document.querySelectorAll('.plot-wide .dot:not(.faded)')].map((dot) => dot.getAttribute('href'))"
    bright = page.evaluate(drawn)
    assert bright == [f"#{entry.anchor}" for entry in MEASURED if entry.anchor in found]


@browser
@pytest.mark.parametrize("column", COLUMNS)
def test_a_heading_sorts_one_way_and_then_the_other(page: Page, column: str) -> None:
    head = f"document.querySelectorAll('#catalogue th')[{list(COLUMNS).index(column)}]"
    states = []
    for _ in range(2):
        page.evaluate(f"{head}.querySelector('button').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13)
        states.append(page.evaluate(f"{head}.getAttribute('aria-sort')"))
        assert page.evaluate(NAMES) == ordered(column, descending=states[-1] == "descending")
        assert page.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1
    first = "descending" if column == "Model" else COLUMNS[column]  # it is sorted by name at first
    assert states == [first, "ascending" if first == "descending" else "descending"]


@browser
def test_filters_and_search_hold_at_once_and_outlast_sorting(page: Page) -> None:
    page.evaluate("document.getElementById('measured').click()")
    assert set(page.evaluate(NAMES)) == {entry.anchor for entry in MEASURED}
    page.evaluate("Object.assign(document.getElementById('kind'), {value: 'hybrid'}).dispatchEvent(new Event('input'))")
    page.evaluate("document.querySelectorAll('#catalogue th button')[5].click()")
    best = [entry for entry in ENTRIES if entry.is_hybrid and entry.point]
    best.sort(key=KEYS["ImageNet-1k top-1"], reverse=True)
    assert len(best) == 3
    assert page.evaluate(NAMES) == [entry.anchor for entry in best]
    enter(page, "s/32")
    assert page.evaluate(NAMES) == [entry.anchor for entry in best if entry.name == "R26+ViT-S/32"]


@browser
def test_a_card_opens_in_a_window_and_closes_by_keyboard(page: Page) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "ViT-L/16" and not entry.is_default)
    link = f"document.querySelector('#catalogue a[href=\"#{entry.anchor}\"]')"
    page.evaluate(f"{link}.focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13)
    page.until("document.getElementById('window').open")
    assert page.evaluate("document.querySelector('dialog article h3').textContent") == entry.name
    assert page.evaluate("document.querySelectorAll('dialog .weights').length") == len(zoo.card(entry.name).weights)
    assert page.evaluate("location.hash") == f"#{entry.anchor}"
    top = page.evaluate(f"document.getElementById({entry.anchor!r}).getBoundingClientRect().top")
    assert 0 < top < 200  # the page scrolls to these weights
    press(page, "Escape", 27)
    page.until("!document.getElementById('window').open && location.hash === ''")
    assert page.evaluate(f"document.activeElement === {link}")
    assert page.evaluate("document.querySelectorAll('#cards > article').length") == len(zoo.names())


@browser
def test_the_address_and_the_way_back_open_and_close_cards(page: Page, address: str) -> None:
    first, second = ENTRIES[0], ENTRIES[-1]
    page.open("about:blank")
    page.open(f"{address}#{first.anchor}")
    page.until(f"!!document.querySelector('dialog[open] #{first.model_anchor}')")
    page.evaluate(f"location.hash = {second.model_anchor!r}")
    page.until(f"!!document.querySelector('dialog[open] #{second.model_anchor}')")
    assert page.evaluate("document.querySelectorAll('dialog article').length") == 1
    page.evaluate("history.back()")
    page.until(f"!!document.querySelector('dialog[open] #{first.model_anchor}')")
    page.evaluate("document.getElementById('close').click()")
    page.until("!document.getElementById('window').open")
    dot = next(entry for entry in MEASURED if entry.is_hybrid)
    page.evaluate(
        f"document.querySelector('.plot-wide .dot[href=\"#{dot.anchor}\"]').dispatchEvent(new MouseEvent('click'))"
    )
    page.until(f"!!document.querySelector('dialog[open] #{dot.model_anchor}')")


@browser
def test_a_click_beside_the_card_closes_it_and_one_on_its_margin_does_not(page: Page) -> None:
    page.evaluate(f"location.hash = {ENTRIES[0].anchor!r}")
    page.until("document.getElementById('window').open")
    box = page.evaluate("document.getElementById('window').getBoundingClientRect().toJSON()")
    for x, opened in ((box["left"] + 4, True), (box["left"] - 4, False)):
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": x, "y": box["top"] + box["height"] / 2}
            page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        assert page.evaluate("document.getElementById('window').open") == opened
    page.until("location.hash === ''")


@browser
def test_the_line_that_loads_is_copied(page: Page, address: str) -> None:
    origin = address.rstrip("/")
    page.call("Browser.grantPermissions", origin=origin, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    entry = ENTRIES[0]
    page.evaluate(f"location.hash = {entry.anchor!r}")
    page.until("document.getElementById('window').open")
    page.evaluate("document.querySelector('dialog .load button').click()")
    page.until("['Copied', 'Selected'].includes(document.querySelector('dialog .load button').textContent)")
    if page.evaluate("document.querySelector('dialog .load button').textContent") == "Selected":
        assert page.evaluate("getSelection().toString()") == entry.load
    else:
        assert page.evaluate("navigator.clipboard.readText()") == entry.load


@browser
def test_without_javascript_everything_is_there(window: Page, address: str) -> None:
    window.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        window.open("about:blank")
        window.open(address)
        window.until("document.querySelectorAll('#cards .weights').length > 40")
        assert window.evaluate(NAMES) == [entry.anchor for entry in ENTRIES]
        visible = "[...document.querySelectorAll('#cards article')].every((card) => card.checkVisibility())"
        assert window.evaluate(visible)
        assert not window.evaluate("document.getElementById('controls').checkVisibility()")
        assert window.evaluate("document.querySelectorAll('button').length") == 1  # in the window that never opens
    finally:
        window.call("Emulation.setScriptExecutionDisabled", value=False)


OUTSIDE = """[...document.querySelectorAll('body *')].filter((one) => {
    const box = one.getBoundingClientRect();
    return one.checkVisibility() && box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map((one) => one.outerHTML.slice(0, 80))"""


@browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_leaves_the_page(page: Page, tmp_path: Path, width: str, dark: bool) -> None:
    page.resize(WIDTHS[width])
    page.dark(dark)
    for view in ("list", "card"):
        if view == "card":
            page.evaluate(f"location.hash = {ENTRIES[0].anchor!r}")
            page.until("document.getElementById('window').open")
        page.screenshot(tmp_path / f"{width}-{view}.png")
        print(f"screenshot: {tmp_path / width}-{view}.png")
        assert page.evaluate("innerWidth") == WIDTHS[width]
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
        assert page.evaluate(OUTSIDE) == []


@browser
@pytest.mark.parametrize("width", WIDTHS)
def test_no_label_of_the_plot_covers_another_or_a_dot(page: Page, width: str) -> None:
    page.resize(WIDTHS[width])
    boxes = page.evaluate(
        "[...document.querySelectorAll('.plot :is(.label, .tick, .mark)')].filter((one) => one.checkVisibility())"
        ".map((one) => ({name: one.textContent, ...one.getBoundingClientRect().toJSON()}))"
    )
    assert len([box for box in boxes if "/" in box["name"]]) >= 15  # as many names as there is room for
    for one, other in itertools.combinations(boxes, 2):
        if not one["name"] and not other["name"]:
            continue  # dots do not move
        # 3 pixels of a line's height are above and below its letters.
        apart = one["right"] <= other["left"] or other["right"] <= one["left"]
        assert apart or one["bottom"] <= other["top"] + 3 or other["bottom"] <= one["top"] + 3, (one, other)


@browser
def test_every_control_has_a_name(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if not node["ignored"] and "name" in node]
    roles = {"searchbox", "combobox", "checkbox", "button", "link", "table", "columnheader"}
    assert roles - {"table"} <= {role for role, _ in named}
    assert not [role for role, name in named if role in roles - {"table"} and not name]
