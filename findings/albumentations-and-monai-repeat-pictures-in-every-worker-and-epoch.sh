#!/usr/bin/env bash
# Guess: random transforms differ from worker to worker and from epoch to epoch in a torch DataLoader, as
# torchvision's do.
# Fact: albumentations 2.0.8 and MONAI 1.6.1 keep a NumPy generator in the transform. Each worker starts with a copy
# of it, and each epoch starts new workers: with num_workers=2 every random number is used twice, and all epochs are
# equal. With num_workers=0 they differ. monai.data.DataLoader reseeds, if the transform is that of a monai Dataset.
# Why it matters: training on augmented pictures is training on one fixed copy of them; a small ViT overfits and
# nothing is told.
# Instead: worker_init_fn that calls transform.set_random_seed(torch.initial_seed() % 2**32) (MONAI:
# set_random_state); check two epochs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 monai==1.6.1 albumentations==2.0.8 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
import albumentations
import monai
import numpy as np
import torch

print("albumentations", albumentations.__version__, "monai", monai.__version__, "torch", torch.__version__)
picture = np.full((4, 4, 3), 0.5, np.float32)
brightness = albumentations.Compose([albumentations.RandomBrightnessContrast((-0.4, 0.4), (0, 0), p=1)])
scale = monai.transforms.Compose([monai.transforms.RandScaleIntensity(factors=0.8, prob=1)])


class Pictures(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(self.transform())


def two_epochs(transform, reseed=None, **arguments):
    loader = torch.utils.data.DataLoader(Pictures(transform), worker_init_fn=reseed, **arguments)
    return [[round(float(x), 3) for x in loader] for _ in range(2)]


def seed():
    return torch.initial_seed() % 2**32


for name, transform, reseed in (
    ("albumentations", lambda: brightness(image=picture)["image"].mean(), lambda _: brightness.set_random_seed(seed())),
    ("monai", lambda: scale(torch.ones(1, 2, 2)).mean(), lambda _: scale.set_random_state(seed())),
):
    first, second = two_epochs(transform, num_workers=2)
    print(f"{name}, 2 workers: epoch 1 {first}, epoch 2 {second}")
    assert first == second and first[0::2] == first[1::2], f"{name} knows of workers now"
    alone, next_ = two_epochs(transform, num_workers=0)
    assert alone != next_ and alone[0::2] != alone[1::2]
    first, second = two_epochs(transform, reseed, num_workers=2)
    print(f"{name}, 2 workers with worker_init_fn: epoch 1 {first}, epoch 2 {second}")
    assert first != second and first[0::2] != first[1::2]
PY
