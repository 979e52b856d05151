"""Downloads without a network, or from a mirror."""

import os
from pathlib import Path

import pytest

from hostile_server import GOOD, HostileServer, Served, sha256
from keras_vit._util.download import cached_files, fetch
from keras_vit.errors import DownloadError

pytest_plugins = ["download_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

OBJECT = "gs://vit_models/augreg/X.npz"
LAYOUTS = ["vit_models/augreg/X.npz", "augreg/X.npz", "X.npz"]


@pytest.mark.parametrize(
    ("value", "offline"),
    [(text, False) for text in ("", " ", "0", "false", "No", "OFF ", " 0")]
    + [(text, True) for text in ("1", "y", "t", "2", "enabled", " 1", "On ", "TRUE", "never")],
)
def test_anything_but_a_no_is_offline(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv("KERAS_VIT_OFFLINE", value)
    assert cached_files._offline() is offline


@pytest.mark.parametrize("switch", ["KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_the_cache_answers(
    server: HostileServer, cache: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    server.files["/x.npz"] = Served(GOOD)
    path = fetch(f"{server.url}/x.npz")
    monkeypatch.setenv(switch, "1")
    server.requests.clear()
    assert fetch(f"{server.url}/x.npz") == path
    os.truncate(path, 50)
    with pytest.raises(DownloadError, match="damaged"):
        fetch(f"{server.url}/x.npz")
    assert server.requests == []


def test_offline_the_error_says_what_to_put_where(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    with pytest.raises(DownloadError) as caught:
        fetch(OBJECT)
    place = cache / "https/storage.googleapis.com/vit_models/augreg/X.npz"
    assert "https://storage.googleapis.com/vit_models/augreg/X.npz" in str(caught.value)
    assert str(place) in str(caught.value)
    place.parent.mkdir(parents=True)
    place.write_bytes(GOOD[:-1])
    with pytest.raises(DownloadError, match="damaged"):
        fetch(OBJECT)
    place.write_bytes(GOOD)
    assert fetch(OBJECT) == place
    assert fetch(OBJECT, sha256=sha256(GOOD)) == place


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_mirror_folder_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, offline: str) -> None:
    copy = tmp_path / "mirror" / layout
    copy.parent.mkdir(parents=True)
    copy.write_bytes(GOOD)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", offline)
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    assert fetch(OBJECT, sha256=sha256(GOOD)) == copy
    assert fetch(OBJECT.replace("gs://", cached_files.STORAGE)) == copy
    with pytest.raises(DownloadError, match="not the expected file"):
        fetch(OBJECT, sha256="a" * 64)
    monkeypatch.setenv("KERAS_VIT_MIRROR", (tmp_path / "mirror").as_uri())
    assert fetch(OBJECT) == copy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mirror_url_answers(server: HostileServer, cache: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    server.files[f"/m/{layout}"] = Served(GOOD, ["503"])
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{server.url}/m/")
    assert fetch(OBJECT) == cache / "https/storage.googleapis.com/vit_models/augreg/X.npz"
    asked = [f"/m/{it}" for it in LAYOUTS[: LAYOUTS.index(layout) + 1]]
    assert [path for path, _ in server.requests] == [*asked, asked[-1]]


def test_a_mirror_without_the_file_says_what_was_tried(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mirror in (server.url, str(tmp_path)):
        monkeypatch.setenv("KERAS_VIT_MIRROR", mirror)
        with pytest.raises(DownloadError) as caught:
            fetch(OBJECT)
        assert all(f"{mirror}/{layout}" in str(caught.value) for layout in LAYOUTS)


def test_a_mirror_has_hub_files_by_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
    copy = tmp_path / "org" / "repo@main" / "dir" / "x.npz"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(GOOD)
    assert fetch("hf://org/repo/dir/x.npz@main") == copy
    with pytest.raises(DownloadError, match="Looked for"):
        fetch("hf://org/repo/dir/x.npz@v2")
