"""Datasets of random pictures, each sample made a PIL image and transformed as in the real ones.

`STUB_SAMPLES` says how many there are.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SAMPLES = int(os.environ.get("STUB_SAMPLES", "6000"))


class _Pictures(Dataset):
    shape: tuple[int, ...] = (28, 28)

    def __init__(self, root=None, train=True, transform=None, target_transform=None, **_) -> None:
        dice = torch.Generator().manual_seed(int(train))
        self.transform, count = transform, SAMPLES if train else SAMPLES // 6
        self.data = torch.randint(256, (count, *self.shape), dtype=torch.uint8, generator=dice)
        self.targets = torch.randint(10, (count,), generator=dice)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        image = Image.fromarray(self.data[index].numpy())
        return self.transform(image) if self.transform else image, int(self.targets[index])


class MNIST(_Pictures):
    """28x28, grey."""


class CIFAR10(_Pictures):
    """32x32, in colour."""

    shape = (32, 32, 3)


class FakeData(_Pictures):
    """Pictures of a size."""

    def __init__(self, size=0, image_size=(3, 64, 64), num_classes=10, transform=None) -> None:
        self.shape = (*image_size[1:], image_size[0])
        super().__init__(transform=transform)


class ImageFolder(Dataset):
    """Files below a folder, read anew each time."""

    def __init__(self, root: str, transform=None) -> None:
        self.files, self.transform = sorted(p for p in Path(root).rglob("*.*")), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int):
        image = Image.open(self.files[index]).convert("RGB")
        return self.transform(image) if self.transform else np.asarray(image), 0
