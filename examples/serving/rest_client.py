"""Classify image files with a model server, over REST. Needs only Python.

python rest_client.py http://localhost:8501 cat.jpg dog.png
"""

import argparse
import base64
import contextlib
import http.client
import json
import urllib.parse
from pathlib import Path
from typing import Any


def classify(
    connection: http.client.HTTPConnection,
    files: list[bytes],
    *,
    model: str = "vit",
    signature: str = "serving_default",
) -> list[dict[str, Any]]:
    """Return for each file "classes" and their "scores", best first, and "probabilities".

    Args:
        connection: to the server; it stays open for the next call, and one thread at a time uses it.
        files: contents of JPEG or PNG files, at least one.
        model: its name on the server.
        signature: "tolerant" adds "valid"; with the others one bad file fails the call.

    Raises:
        ValueError: the server refuses the request, for example because of a corrupt image.
        RuntimeError: the server answers with another error.
    """
    instances = [{"b64": base64.b64encode(file).decode()} for file in files]
    body = json.dumps({"signature_name": signature, "instances": instances})
    connection.request("POST", f"/v1/models/{model}:predict", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status == 200:
        return json.loads(content)["predictions"]
    error = ValueError if response.status == 400 else RuntimeError
    raise error(f"{response.status}: {content.decode(errors='replace')}")


def main() -> None:
    """Print the best classes of each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--model", default="vit")
    asked = parser.parse_args()
    files = [path.read_bytes() for path in asked.images]
    with contextlib.closing(http.client.HTTPConnection(urllib.parse.urlsplit(asked.url).netloc, timeout=60)) as opened:
        answers = classify(opened, files, model=asked.model)
    for path, answer in zip(asked.images, answers, strict=True):
        print(path, *(f"{name} {score:.1%}" for name, score in zip(answer["classes"], answer["scores"], strict=True)))


if __name__ == "__main__":
    main()
