"""The parts of a report that show the images: what they are taken for, and where the model looks in them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from keras_vit._util.page import Html, bar, data_uri, image, section, table
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import Prediction
from keras_vit.visualize.html import figures
from keras_vit.visualize.html.inside import Inside

SHOWN_SIDE = 448  # pixels of a picture's longer side on the page
FEW_PIXELS = 64  # a picture of so few is shown with hard edges
STYLE = """
.cards { display: grid; gap: 1.25rem 2rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
.card { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 0 1rem; align-items: start; }
.card h3 { grid-column: 1 / -1; margin: 0 0 0.5rem; }
.card img { width: 100%; border-radius: 0.4rem; }
.card th:last-child { width: 45%; }
.cards h3 { margin-top: 0; }
h3, .card td { overflow-wrap: anywhere; }
.pair { display: grid; gap: 0.5rem; grid-template-columns: 1fr 1fr; }
.heads { display: grid; gap: 0.5rem; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
.over { position: relative; overflow: hidden; border-radius: 0.4rem; print-color-adjust: exact; }
.over::before { content: ""; position: absolute; inset: 0; filter: grayscale(1) brightness(0.7);
  background: var(--picture) 0 0 / 100% 100%; }
.over img { position: absolute; top: 0; left: 0; max-width: none; }
.few, .few::before { image-rendering: pixelated; }
@media (max-width: 34rem) {
  .card { grid-template-columns: minmax(0, 1fr); gap: 0.5rem; }
  .card h3 { margin: 0; }
  .card img { max-width: 14rem; }
}
.scale { display: flex; flex-wrap: wrap; gap: 0 0.6rem; align-items: center; margin-bottom: 1rem; font-size: 0.875rem; }
.scale img { width: 9rem; height: 0.9rem; border-radius: 0.2rem; background: #808080; }
"""


def style(seen: Inside) -> str:
    """The CSS of a report: the pictures that several maps lie over are in it once."""
    shown = "".join(f' --picture-{i}: url("{data_uri(_shown(x))}");' for i, x in enumerate(seen.pictures))
    return f"{STYLE}:root {{{shown} }}\n"


def predictions(seen: Inside) -> Html:
    """The images as the model sees them, and its likeliest classes."""
    if seen.predictions is None:
        how, rankings = "This model has no head: it names no classes.", [Html()] * len(seen.names)
    else:
        how = (
            "The images as the model sees them, and its likeliest classes; probabilities are the softmax of its logits."
        )
        if seen.config.is_unpooled:
            how += " It has logits for every token; these are of " + (
                "the class token." if seen.config.classifier == "token_unpooled" else "the mean over the patches."
            )
        rankings = [_ranking(ranking) for ranking in seen.predictions]
    cards = []
    for name, picture, ranking in zip(seen.names, seen.pictures, rankings, strict=True):
        sharp = ' class="few"' if max(picture.shape[:2]) <= FEW_PIXELS else ""
        shown = image(_shown(picture), alt=f"{name} as the model sees it", attributes=sharp)
        cards.append(f'<article class="card"><h3>{escape(name)}</h3>{shown}<div>{ranking}</div></article>')
    content = f'<div class="cards">{"".join(cards)}</div>'
    return section("Images and predictions", how, content, source="paper, section 3.1")


def _ranking(ranking: Sequence[Prediction]) -> Html:
    rows = [(one.label, bar(f"{one.probability:.1%}", one.probability)) for one in ranking]
    return table(("class", "probability"), rows, framed=False, caption="likeliest classes")


def places(seen: Inside) -> Html:
    """Attention rollout and the last attention over every image."""
    last = "the probe's attention" if seen.config.has_map_head else "the last block's attention"
    how = (
        "The warmer a patch, the more it counts for the model's feature. Left: attention rollout, through all blocks. "
        f"Right: {last} alone, the mean of its heads{_whose(seen.config)}."
    )
    shown = []
    for i, name in enumerate(seen.names):
        kinds = {"rollout": seen.rollout[i], last.removeprefix("the "): seen.attention[i].mean(axis=0)}
        maps = "".join(
            f"<figure>{_over(seen, i, weights, f'{kind} over {name}')}<figcaption>{kind}: up to "
            f"{weights.max() / max(float(weights.mean()), 1e-30):.1f} × the average</figcaption></figure>"
            for kind, weights in kinds.items()
        )
        shown.append(f'<div><h3>{escape(name)}</h3><div class="pair">{maps}</div></div>')
    source = "paper, section 4.5, figure 6 and appendix D.8; rollout: arXiv 2005.00928"
    scale = image(figures.heat_scale(), alt="colours from violet to yellow")
    legend = f'<p class="scale">the average patch, or less {scale} {figures.WARMEST} times that, or more</p>'
    return section("Where it looks", how, f'{legend}<div class="cards">{"".join(shown)}</div>', source=source)


def heads(seen: Inside) -> Html:
    """The last attention over every image, head by head."""
    where = "pooling" if seen.config.has_map_head else "last block"
    how = (
        f"The attention of the {where} head by head{_whose(seen.config)}, in the same colours: heads that differ look "
        "for different things."
    )
    count = seen.attention.shape[1]
    columns = 3 if count % 3 == 0 and count % 4 else min(4, count)
    shown = []
    for i, name in enumerate(seen.names):
        maps = "".join(
            f"<figure>{_over(seen, i, weights, f'attention of head {head} over {name}')}"
            f"<figcaption>head {head}</figcaption></figure>"
            for head, weights in enumerate(seen.attention[i], start=1)
        )
        grid = f'<div class="heads" style="--columns: {columns}">{maps}</div>'
        shown.append(f"<div><h3>{escape(name)}</h3>{grid}</div>")
    content = f'<div class="cards">{"".join(shown)}</div>'
    return section(f"The heads of the {where}", how, content, source="paper, section 4.5")


def _whose(config: ViTConfig) -> str:
    """Whose attention `class_attention` is, where it is not a class token's."""
    if config.has_map_head:
        return ""
    if config.reads_class_token:
        return ", the mean of class and distillation token" if config.distilled else ", of the class token"
    return ", the mean over all patches (this model reads no class token)"


def _over(seen: Inside, number: int, weights: np.ndarray, alt: str) -> Html:
    """A heat map over its grey picture: as large as the patches that the model sees, which may leave a rest."""
    height, width = seen.config.size
    across, down = (
        100 * cells * step / side
        for cells, step, side in zip(weights.shape[::-1], seen.config.stride[::-1], (width, height), strict=True)
    )
    sheet = image(figures.heat(weights), alt=alt, attributes=f'style="width: {across:.4g}%; height: {down:.4g}%"')
    few = " few" if max(height, width) <= FEW_PIXELS else ""
    ground = f"--picture: var(--picture-{number}); aspect-ratio: {width} / {height}"
    return Html(f'<div class="over{few}" style="{ground}">{sheet}</div>')


def _shown(picture: np.ndarray) -> np.ndarray:
    """A picture at the size that a page shows it in."""
    from PIL import Image

    shown = Image.fromarray(picture)
    shown.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(shown)
