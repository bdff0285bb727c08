"""As much of torchvision as foreign programs use, on made data: the real one is not installed."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
