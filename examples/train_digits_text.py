"""Train a text tower for the digits model that comes with the package, as its other half: seconds.

    pip install '.[demo,text]'     # in a clone of keras_vit
    python examples/train_digits_text.py --output digits-text.keras

The image tower stays as it is: only the texts move, towards the images that they describe (locked-image tuning, arXiv
2111.07991). The tokens are single letters. The tower in zoo/weights is that of seed 0, chosen before training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from keras_vit import digits, text, zoo

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = (
    "{}",
    "{}.",
    "a {}",
    "the {}",
    "a photo of a {}.",
    "a photo of the digit {}.",
    "a handwritten {}",
    "digit {}",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,-'"
START, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 40
LOGIT_SCALE = 3.0  # its exponential, 20, is the factor of the cosines


def letter_tokenizer() -> text.Tokenizer:
    """Return a tokenizer of CLIP's kind that has no merges, so that each letter is a token."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), START, END]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    engine = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=END, end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    return text.Tokenizer(engine.to_str().encode(), length=LENGTH)


def train(*, steps: int, seed: int) -> text.TextEncoder:
    """Train a text tower for the embeddings of the digits model."""
    keras.utils.set_random_seed(seed)
    tokenizer = letter_tokenizer()
    data, image_tower = digits.load(), zoo.load("digits", num_classes=0)
    config = text.TextConfig(
        vocab_size=tokenizer.vocab_size,
        max_length=LENGTH,
        hidden_size=32,
        mlp_dim=64,
        num_heads=4,
        num_layers=1,
        end_token=tokenizer.end_id,
        projection_size=image_tower.config.hidden_size,
        logit_scale=LOGIT_SCALE,
    )
    encoder = text.TextEncoder(config, tokenizer)
    names = [(name, str(number)) for number, name in enumerate(NAMES)]
    ids = np.stack([tokenizer([prompt.format(name) for name in both for prompt in PROMPTS]) for both in names])
    images, labels = tf.constant(image_tower.embed(data.train_images)), tf.constant(data.train_labels)
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps))

    @tf.function
    def step(texts: tf.Tensor) -> tf.Tensor:
        """Move the ten texts of a step, one for each digit, by the cross-entropy of all images."""
        with tf.GradientTape() as tape:
            rows = tf.math.l2_normalize(encoder(texts, training=True), axis=1)
            logits = np.exp(LOGIT_SCALE) * tf.matmul(images, rows, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply(tape.gradient(loss, encoder.trainable_variables), encoder.trainable_variables)
        return loss

    random = np.random.default_rng(seed)
    for number in range(steps):
        loss = step(tf.constant(ids[np.arange(10), random.integers(0, ids.shape[1], 10)]))
        if number % 100 == 99:
            print(f"step {number + 1}: cross-entropy {loss:.3f}")
    return encoder


def main() -> None:
    """Read the command line, train, measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("digits-text.keras"), help="where the text tower goes")
    parser.add_argument("--seed", type=int, default=0, help="of initialisation and order (0)")
    parser.add_argument("--steps", type=int, default=400, help="number of updates (400)")
    arguments = parser.parse_args()

    encoder, data = train(steps=arguments.steps, seed=arguments.seed), digits.load()
    images = zoo.load("digits", num_classes=0).embed(data.test_images)
    for prompt in ("a photo of a {}.", "a picture of the {}"):  # one of PROMPTS, and a new one
        texts = encoder.embed([prompt.format(name) for name in NAMES])
        accuracy = np.mean((images @ texts.T).argmax(axis=1) == data.test_labels)
        print(f"accuracy {accuracy:.4f} on {len(images)} held-out images, by the texts {prompt!r}")
    encoder.save(arguments.output)


if __name__ == "__main__":
    main()
