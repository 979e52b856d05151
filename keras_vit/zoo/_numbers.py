"""Count the numbers of the zoo's models and keep them with the cards: `make numbers`, after a card was added."""

import json
from collections.abc import Iterator

from keras_vit.model.config import ViTConfig
from keras_vit.model.numbers import fingerprint, path, to_json
from keras_vit.zoo import catalogue


def published_configs() -> Iterator[ViTConfig]:
    """Yield the config of every file of weights with a card."""
    for name in catalogue.names():
        for weights in catalogue.card(name).weights.values():
            yield weights.whole_config()


def write() -> None:
    """Write zoo/numbers.json, one line for each config."""
    from keras_vit.model.cost import count

    found = {fingerprint(config): to_json(count(config)) for config in published_configs()}
    lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    path().write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
