"""Transforms of PIL images."""

# ruff: noqa: D102

from __future__ import annotations

import numpy as np
import torch


class Compose:
    """One after another."""

    def __init__(self, transforms) -> None:
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    """A function."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, image):
        return self.function(image)


class ToTensor:
    """To floats from 0 to 1, channels first."""

    def __call__(self, image):
        array = np.array(image, copy=True)
        array = array[:, :, None] if array.ndim == 2 else array
        return torch.from_numpy(array).permute(2, 0, 1).contiguous().float().div(255)


class Normalize:
    """Less the mean, over the deviation."""

    def __init__(self, mean, std) -> None:
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, image):
        return (image - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


class Resize:
    """To a size."""

    def __init__(self, size) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image):
        return image.resize(self.size)


class CenterCrop:
    """The middle."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image):
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))
