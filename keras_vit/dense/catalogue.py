"""Published models of maps by name: zoo/dense/*.toml. Files are downloaded once, after their terms are accepted."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from keras_vit._util import data_files
from keras_vit._util.text import nearest


@dataclass(frozen=True, kw_only=True)
class MapCard:
    """A published model of maps: a repository on the Hugging Face Hub.

    Args:
        name: by which `dense.load` finds it.
        repository: on the Hugging Face Hub.
        licence: SPDX identifier.
        paper: arXiv number.
        source: publisher.
        terms: address of terms that one must accept before the download; None for a free licence.

    Example:
        >>> keras_vit.dense.cards()["DPT-L"].repository
        'Intel/dpt-large'
    """

    name: str
    repository: str
    licence: str
    paper: str
    source: str
    terms: str | None = None


def cards() -> dict[str, MapCard]:
    """Return the cards of all published models of maps, by name.

    Example:
        >>> keras_vit.dense.cards()["Depth-Anything-V2-B"].licence
        'CC-BY-NC-4.0'
    """
    found = {}
    for path in sorted((data_files.data_folder("zoo") / "dense").glob("*.toml")):
        raw = data_files.read_toml(path)
        for name, fields in raw["models"].items():
            (paper,) = (number for pattern, number in raw["papers"].items() if fnmatchcase(name, pattern))
            found[name] = MapCard(name=name, paper=paper, source=raw["source"], **fields)
    return found


def fetch_card(name: str, *, accept_licence: bool) -> Path:
    """Return the file of a published model after fetching what is beside it; errors as `dense.load`."""
    from keras_vit._util.downloads import check_licence, fetch

    known = cards()
    if name not in known:
        raise FileNotFoundError(
            f"There is no file or folder {name!r:.200}, nor a model; the nearest: {nearest(name, known)}"
        )
    card = known[name]
    folder = f"hf://{card.repository}/"
    check_licence(f"{folder}model.safetensors", name, card.licence, card.terms, is_accepted=accept_licence)
    for beside in ("config.json", "preprocessor_config.json"):
        fetch(folder + beside)
    return fetch(f"{folder}model.safetensors")
