"""Classify image files with a model server, over gRPC. Needs tensorflow-serving-api, which installs TensorFlow.

python grpc_client.py localhost:8500 cat.jpg dog.png
"""

import argparse
from pathlib import Path
from typing import Any

import grpc
import tensorflow as tf
from tensorflow_serving.apis.predict_pb2 import PredictRequest
from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub


def classify(
    stub: PredictionServiceStub,
    files: list[bytes],
    *,
    model: str = "vit",
    signature: str = "serving_default",
    outputs: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the server's outputs for the files: arrays whose first axis is the file.

    Args:
        stub: for a channel to the server; any number of threads may use it.
        files: contents of JPEG or PNG files.
        model: its name on the server.
        signature: "tolerant" adds "valid"; with the others one bad file fails the call.
        outputs: names of the wanted outputs, for example "classes" and "scores"; all if it is empty.

    Raises:
        grpc.RpcError: its code() is INVALID_ARGUMENT if a file is not a valid image.
    """
    request = PredictRequest(output_filter=outputs)
    request.model_spec.name, request.model_spec.signature_name = model, signature
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(files, dtype=tf.string, shape=[len(files)]))
    answer = stub.Predict(request, timeout=60)
    return {name: tf.make_ndarray(tensor) for name, tensor in answer.outputs.items()}


def main() -> None:
    """Print the best classes of each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--model", default="vit")
    asked = parser.parse_args()
    files = [path.read_bytes() for path in asked.images]
    with grpc.insecure_channel(asked.address) as channel:
        answer = classify(PredictionServiceStub(channel), files, model=asked.model, outputs=("classes", "scores"))
    for path, classes, scores in zip(asked.images, answer["classes"], answer["scores"], strict=True):
        print(path, *(f"{name.decode()} {score:.1%}" for name, score in zip(classes, scores, strict=True)))


if __name__ == "__main__":
    main()
