"""Transfers: whatever the server does, the result is the complete and correct file, or an error."""

import base64
import hashlib
import io
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import urllib3

from hostile_server import GOOD, HostileServer, Served, hdf5, npz, safetensors_file, sha256
from keras_vit._util.download import fetch, integrity, transfer
from keras_vit.errors import DownloadError

pytest_plugins = ["download_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")


def kept(folder: Path) -> list[Path]:
    """Return the files under their final names: all except pins, locks and partial downloads."""
    side = (".sha256", ".lock", ".part", ".etag")
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix not in side]


@pytest.mark.parametrize(
    ("served", "ranges"),
    [
        (Served(GOOD), [None]),
        (Served(GOOD, ["503", "503"]), [None] * 3),
        (Served(GOOD, ["429"]), [None] * 2),
        (Served(GOOD, ["cut"]), [None, "bytes=R-"]),
        (Served(GOOD, ["cut"] * 4), [None] + ["bytes=R-"] * 4),
        (Served(GOOD, ["cut"], ranges=False), [None, "bytes=R-"]),
        (Served(GOOD, ["cut", "wrong"]), [None, "bytes=R-", None]),
        (Served(GOOD, ["cut", "shifted"]), [None, "bytes=R-", None]),
        (Served(GOOD, ["stall"]), [None, "bytes=R-"]),
        (Served(GOOD, ["wrong"]), [None] * 2),
        (Served(GOOD, ["cut"], no_length=True), [None] * 2),
    ],
    ids=lambda value: f"{value.faults}-{value.headers}" if isinstance(value, Served) else "",
)
@pytest.mark.parametrize("known", [True, False], ids=["sha256", "no hash"])
def test_passing_failures_are_overcome(
    server: HostileServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Served,
    ranges: list[str | None],
    known: bool,
) -> None:
    if "stall" in served.faults:
        monkeypatch.setattr(transfer, "STALL", 1.0)
    server.files["/dir/x.npz"] = Served(**{**vars(served), "faults": list(served.faults)})
    path = fetch(f"{server.url}/dir/x.npz", sha256=sha256(GOOD) if known else None)
    assert path.read_bytes() == GOOD
    assert path.name == "x.npz"
    assert [asked and re.sub(r"\d+", "R", asked) for _, asked in server.requests] == ranges
    assert sorted(it.suffix for it in cache.rglob("x.npz*")) in (
        [".lock", ".npz", ".sha256"],
        [".npz", ".sha256"],
    )
    server.requests.clear()
    assert fetch(f"{server.url}/dir/x.npz") == path
    assert server.requests == []


MD5_OF_NEW = {"x-goog-hash": f"md5={base64.b64encode(hashlib.md5(b'new' * 1000).digest()).decode()}"}


@pytest.mark.parametrize("stated", [MD5_OF_NEW, {}], ids=["md5", "no hash"])
def test_a_transfer_never_joins_two_versions(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, stated: dict[str, str]
) -> None:
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    url = f"{server.url}/x.dat"
    server.files["/x.dat"] = Served(b"old" * 1000, always="cut", headers=stated)
    with pytest.raises(DownloadError, match="2 attempts.*1500|2 attempts.*IncompleteRead"):
        fetch(url)
    server.requests.clear()
    server.files["/x.dat"] = Served(b"new" * 1000, headers=stated)
    assert fetch(url).read_bytes() == b"new" * 1000
    assert bool(server.requests[0][1]) is bool(stated)


@pytest.mark.parametrize("name", ["x.safetensors", "x.h5", "x.json", "x.dat"])
def test_a_file_is_not_resumed_if_its_content_cannot_be_checked(server: HostileServer, name: str) -> None:
    body = {"x.safetensors": safetensors_file(), "x.h5": hdf5(), "x.json": b"[1, 2, 3]"}.get(name, b"12345678")
    server.files[f"/{name}"] = Served(body, ["cut"])
    assert fetch(f"{server.url}/{name}").read_bytes() == body
    assert [asked for _, asked in server.requests] == [None, None]


def test_a_part_that_a_killed_process_left_is_not_resumed_if_it_cannot_be_checked(
    server: HostileServer, tmp_path: Path
) -> None:
    (tmp_path / "x.dat.part").write_bytes(b"old")
    server.files["/x.dat"] = Served(b"12345678")
    transfer.download(f"{server.url}/x.dat", tmp_path / "x.dat.part", integrity.Expected())
    assert (tmp_path / "x.dat.part").read_bytes() == b"12345678"
    assert [asked for _, asked in server.requests] == ["bytes=3-", None]


def test_a_known_size_replaces_the_stated_one(server: HostileServer) -> None:
    server.files["/x.npz"] = Served(GOOD, ["cut"], no_length=True)
    assert fetch(f"{server.url}/x.npz", size=len(GOOD)).read_bytes() == GOOD
    assert server.requests[1][1] == f"bytes={len(GOOD) // 2}-"


def test_a_range_beyond_the_end_starts_again(server: HostileServer) -> None:
    server.files |= {"/x.npz": Served(GOOD, ["cut"] * 5)}
    with pytest.raises(DownloadError):
        fetch(f"{server.url}/x.npz")
    shorter = npz(count=5)
    server.files["/x.npz"] = Served(shorter)
    assert fetch(f"{server.url}/x.npz").read_bytes() == shorter


def test_a_download_that_was_killed_is_resumed(server: HostileServer, cache: Path) -> None:
    url, body = f"{server.url}/x.npz", npz(count=200_000)
    assert len(body) > 6 * transfer.CHUNK  # so that some of its first half is on disk when the process dies
    server.files["/x.npz"] = Served(body, ["stall"])
    child = subprocess.Popen([sys.executable, "-c", f"from keras_vit._util.download import fetch; fetch({url!r})"])
    deadline = time.monotonic() + 20
    while not any(part.stat().st_size for part in cache.rglob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert kept(cache) == []
    assert fetch(url).read_bytes() == body
    assert re.fullmatch(r"bytes=[1-9]\d*-", server.requests[1][1] or "")


def test_four_processes_at_once_download_once(server: HostileServer) -> None:
    server.files["/x.npz"] = Served(GOOD, ["503"])
    code = f"from keras_vit._util.download import fetch; print(fetch({server.url + '/x.npz'!r}).stat().st_size)"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=30)[0] for child in children] == [f"{len(GOOD)}\n"] * 4
    assert len(server.requests) == 2  # one process: 503, then the file


# ------------------------------------------------------------------ what must never be returned

BAD_PAGE = b"<html>please log in</html>"
ZIP = "is not an intact .* not a zip file"
KINDS = {"npz": ZIP, "keras": ZIP, "pth": ZIP, "pt": ZIP, "bin": ZIP, "h5": "not an HDF5", "json": "not valid JSON"}
KINDS["safetensors"] = "header"


def hostile(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


OTHER = "a" * 64


@pytest.mark.parametrize(
    ("file", "served", "known", "message"),
    [
        ("x.npz", Served(GOOD, always="404"), {}, "404"),
        ("x.npz", Served(GOOD, always="403"), {}, "403"),
        ("x.npz", Served(GOOD, always="400"), {}, "400"),
        ("x.npz", Served(GOOD, always="503"), {}, "5 attempts.*503"),
        ("x.npz", Served(GOOD, always="cut"), {}, "5 attempts.*(ended after|IncompleteRead)"),
        ("x.npz", Served(GOOD, always="cut", no_length=True), {}, "twice with wrong content.*not an intact .npz"),
        ("x.npz", Served(GOOD, always="wrong"), {}, "twice with wrong content"),
        ("x.npz", Served(GOOD, always="wrong"), {"sha256": sha256(GOOD)}, "sha256 is"),
        ("x.npz", Served(GOOD), {"sha256": OTHER}, f"expected {OTHER}"),
        ("x.npz", Served(GOOD), {"size": 7}, f"states {len(GOOD):,} bytes, expected 7"),
        ("x.dat", Served(GOOD, no_length=True), {"size": 7}, "sent more than 7 bytes"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) + 9), {}, "5 attempts"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) + 9), {"sha256": sha256(GOOD)}, "5 attempts"),
        ("x.npz", Served(GOOD, stated_length=len(GOOD) - 9), {}, "not an intact .npz"),
        *[(f"x.{suffix}", Served(BAD_PAGE), {}, "is a web page") for suffix in KINDS],
        *[(f"x.{suffix}", Served(b"x" * 99), {}, reason) for suffix, reason in KINDS.items()],
        ("x.dat", Served(b"\n<!DOCTYPE HTML><head></head>"), {}, "is a web page"),
        ("x.json", Served(b'{"hidden_size": 7'), {}, "not valid JSON"),
        ("x.json", Served(b"[" * 100_000), {}, "not valid JSON"),
        ("x.h5", Served(hdf5()[:-1]), {}, "own header states"),
        ("x.safetensors", Served(hostile(b"[" * 200_000)), {}, "no valid safetensors header"),
        ("x.safetensors", Served(hostile(b" " * (3 << 20))), {}, "no valid safetensors header"),
        ("x.safetensors", Served(safetensors_file()[:-1], no_length=True), {}, "no valid safetensors header"),
        ("x.dat", Served(GOOD, no_length=True), {}, "neither a length nor a checksum.*#sha256=<hex>"),
        ("x.dat", Served(GOOD, always="cut", headers={"x-goog-hash": "md5=AAAA"}), {}, "5 attempts"),
    ],
)
def test_nothing_bad_is_returned(
    server: HostileServer, cache: Path, file: str, served: Served, known: dict[str, str | int], message: str
) -> None:
    server.files[f"/{file}"] = served
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(f"{server.url}/{file}", **known)  # type: ignore[arg-type]
    assert "KERAS_VIT_CACHE" not in str(caught.value)  # the advice for full disks
    assert kept(cache) == []
    if served.always in ("404", "403", "400"):
        assert len(server.requests) == 1


def test_a_server_that_stalls_for_ever_is_given_up(
    server: HostileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL", 0.1)
    server.files["/x.npz"] = Served(GOOD, always="stall")
    with pytest.raises(DownloadError, match="5 attempts.*timed out"):
        fetch(f"{server.url}/x.npz")
    assert kept(cache) == []


def test_a_server_that_is_not_there_is_given_up(server: HostileServer) -> None:
    server.server_close()
    with pytest.raises(DownloadError, match="There is no connection to 127.0.0.1"):
        fetch(f"{server.url}/x.npz")


def test_a_host_without_a_name_is_one_attempt_and_one_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", None)  # a second attempt would wait
    with pytest.raises(DownloadError) as caught:
        fetch("gs://vit_models/sam/ViT-B_16.npz")
    message = str(caught.value)
    assert len(message) < 250
    assert all(word in message for word in ("storage.googleapis.com", "'digits'", "path", "KERAS_VIT_OFFLINE"))


@pytest.mark.parametrize(
    "file", [Served(GOOD, always="drip"), Served(b"", always="drip", raw=b"HTTP/1.1 200 OK\r\n" * 9)]
)
def test_a_server_that_sends_too_slowly_is_given_up(
    server: HostileServer, cache: Path, monkeypatch: pytest.MonkeyPatch, file: Served
) -> None:
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    monkeypatch.setattr(transfer, "SLOW_PERIOD", 0.2)
    monkeypatch.setattr(transfer, "HEADER_DEADLINE", 0.3)
    server.files["/x.npz"] = file
    with pytest.raises(DownloadError, match="bytes were received in 0 seconds|no complete headers in 0.3 seconds"):
        fetch(f"{server.url}/x.npz")
    assert kept(cache) == []


# ------------------------------------------------------------------ redirects and broken headers


def redirect(target: str | bytes) -> Served:
    target = target.encode() if isinstance(target, str) else target
    return Served(b"", raw=b"HTTP/1.1 302 Found\r\nLocation: " + target + b"\r\nContent-Length: 0\r\n\r\n")


def test_redirects_are_followed_with_their_cookies_and_ranges(server: HostileServer) -> None:
    server.files |= {"/a.npz": redirect("b"), "/b": redirect("/c"), "/c": Served(GOOD, ["cut"])}
    assert fetch(f"{server.url}/a.npz").read_bytes() == GOOD
    assert server.requests[-1] == ("/c", f"bytes={len(GOOD) // 2}-")


@pytest.mark.parametrize("length", [b"Content-Length: 999999999", b"Transfer-Encoding: chunked"])
def test_the_body_of_a_redirect_is_not_read(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, length: bytes
) -> None:
    monkeypatch.setattr(transfer, "HEADER_DEADLINE", 5.0)
    endless = b"HTTP/1.1 302 Found\r\nLocation: /b.npz\r\n" + length + b"\r\n\r\n" + b"400\r\n" * 200
    server.files |= {"/a.npz": Served(b"", always="stall", raw=endless), "/b.npz": Served(GOOD)}
    assert fetch(f"{server.url}/a.npz").read_bytes() == GOOD


@pytest.mark.parametrize(
    "answer",
    [
        redirect("http://[/"),
        redirect("http://host:port/"),
        redirect(b"\xff\xfe"),
        redirect("ftp://host/x"),
        redirect("//"),
        redirect("http://" + "a" * 300),
        redirect("/x.npz"),  # a loop
        Served(b"", raw=b"HTTP/1.1 200 OK\r\nx-goog-hash: md5=A\r\nContent-Length: 1\r\n\r\nx"),
        Served(b"", raw=b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nx"),
        Served(b"", raw=b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-1/" + b"9" * 5000 + b"\r\n\r\nx"),
        Served(b"", raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        Served(b"", raw=b"\xff" * 100),
    ],
    ids=range(12),
)
def test_a_broken_answer_is_a_download_error(server: HostileServer, cache: Path, answer: Served) -> None:
    server.files["/x.npz"] = answer
    with pytest.raises(DownloadError) as caught:
        fetch(f"{server.url}/x.npz")
    assert len(str(caught.value)) < 900
    assert kept(cache) == []


def test_https_is_not_redirected_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: requests.adapters.HTTPAdapter, request: requests.PreparedRequest, **_: object) -> requests.Response:
        is_secure = str(request.url).startswith("https")
        headers = {"Location": "http://host/x.npz"} if is_secure else {"Content-Length": str(len(GOOD))}
        body = io.BytesIO(b"" if is_secure else GOOD)
        answer = urllib3.HTTPResponse(body, headers, 302 if is_secure else 200, preload_content=False)
        return self.build_response(request, answer)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    with pytest.raises(DownloadError, match="redirects from https to http.*http://host/x.npz"):
        fetch("https://host/x.npz")


# crc32c's published check value for these digits is e3069283; the other is the output of md5sum.
DIGITS = b"123456789"
MD5, CRC32C = "JfnnlDI7RTiF9RgfG2JNCw==", "4waSgw=="
NO_MD5, NO_CRC32C = "A" + MD5[1:], "5" + CRC32C[1:]


@pytest.mark.parametrize(
    ("stated", "wrong"),
    [
        (f"md5={MD5}", None),
        (f"crc32c={CRC32C}", None),
        (f"crc32c={CRC32C},md5={MD5}", None),
        (f"md5={NO_MD5}", "md5"),
        (f"crc32c={NO_CRC32C}", "crc32c"),
        (f"crc32c={CRC32C},md5={NO_MD5}", "md5"),
        (f"crc32c={NO_CRC32C}, md5={MD5}", "crc32c"),
    ],
)
def test_what_the_storage_states_is_verified(
    server: HostileServer, cache: Path, stated: str, wrong: str | None
) -> None:
    server.files["/x.dat"] = Served(DIGITS, headers={"x-goog-hash": stated}, no_length=True)
    if wrong:
        with pytest.raises(DownloadError, match=f"its {wrong} is"):
            fetch(f"{server.url}/x.dat")
        assert kept(cache) == []
    else:
        assert fetch(f"{server.url}/x.dat").read_bytes() == DIGITS


def test_a_known_sha256_outranks_what_the_storage_states(server: HostileServer) -> None:
    server.files["/x.npz"] = Served(DIGITS, headers={"x-goog-hash": f"md5={NO_MD5}"})
    assert fetch(f"{server.url}/x.npz#sha256={sha256(DIGITS).upper()}").read_bytes() == DIGITS
