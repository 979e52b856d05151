"""Serve the same SavedModel with KServe's V1 protocol (TensorFlow Serving's REST). pip install kserve tensorflow.

python kserve_model.py --model_name vit --model_dir models/vit/1 --http_port 8080
"""

import argparse
import base64
from typing import Any

import tensorflow as tf
from kserve import Model, ModelServer, model_server
from kserve.errors import InvalidInput


class ImageClassifier(Model):
    """A SavedModel whose signatures take image files."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(name)
        self.module = tf.saved_model.load(folder)
        self.ready = True

    def predict(self, payload: dict[str, Any], headers: Any = None, response_headers: Any = None) -> dict[str, Any]:
        """Answer {"instances": [{"b64": ...}]}; a file that is not an image gives status 400."""
        signature = payload.get("signature_name", "serving_default")
        try:
            files = [base64.b64decode(instance["b64"], validate=True) for instance in payload["instances"]]
            found = self.module.signatures[signature](image_bytes=tf.constant(files, tf.string, shape=[len(files)]))
        except (KeyError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise InvalidInput(str(error)) from error
        columns = {name: as_text(value.numpy().tolist()) for name, value in found.items()}
        return {"predictions": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}


def as_text(value: Any) -> Any:
    """Return a value as JSON can hold it: bytes become text."""
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--model_dir", required=True)
    asked, _ = parser.parse_known_args()
    ModelServer().start([ImageClassifier(asked.model_name, asked.model_dir)])
