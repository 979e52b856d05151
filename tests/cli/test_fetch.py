"""`keras-vit fetch` downloads and verifies all files of models, and prints where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import fails, run
from file_server import FileServer, Served
from keras_vit import converters, dense
from keras_vit.zoo import cards
from tiny_models import built

pytest_plugins = ["download_fixtures"]


def test_a_name_has_the_files_of_both_encoders_and_starts_no_tensorflow() -> None:
    code = (
        "import sys; from keras_vit.cli import main; sys.argv[1:] = ['fetch', 'digits']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert 'tensorflow' not in sys.modules"
    )
    paths = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    row = cards.select(cards.card("digits"), "default")
    assert paths == [row.location, row.text_location] and all(Path(path).is_file() for path in paths)
    assert json.loads(run("fetch", "digits", "--json")) == {"digits": paths}


@pytest.mark.usefixtures("cache")
def test_a_url_is_downloaded_verified_and_then_read_without_a_network(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = converters.save(built(num_layers=1), tmp_path / "tiny.npz", format="google").read_bytes()
    server.files["/tiny.npz"] = Served(content)
    url = f"{server.url}/tiny.npz"
    path = Path(run("fetch", url).strip())
    assert path.read_bytes() == content and tmp_path in path.parents
    assert "is not the expected file" in fails(monkeypatch, "fetch", f"{url}#sha256={'a' * 64}")
    server.requests.clear()
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    assert run("fetch", url, url) == f"{path}\n" and not server.requests
    server.files["/text.npz"] = Served(b"no checkpoint")
    monkeypatch.delenv("KERAS_VIT_OFFLINE")
    assert "text.npz" in fails(monkeypatch, "fetch", f"{server.url}/text.npz")
    # A wrong name is an error before the first download.
    server.requests.clear()
    assert "No model has this name" in fails(monkeypatch, "fetch", f"{server.url}/other.npz", "nonsense")
    assert not server.requests


@pytest.mark.usefixtures("cache")
def test_a_model_of_maps_has_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, card = next((name, card) for name, card in dense.cards().items() if not card.terms)
    names = ["model.safetensors", "config.json", "preprocessor_config.json"]
    places = [tmp_path / "mirror" / card.repository / each for each in names]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("here")
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    assert run("fetch", name).splitlines() == list(map(str, places))
    assert "--weights are for" in fails(monkeypatch, "fetch", name, "--weights", "x")
