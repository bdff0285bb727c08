"""Pictures of tensors."""

from __future__ import annotations

import torch
from PIL import Image


def save_image(tensor, file, normalize=False, nrow=8, **_) -> None:
    """A grid as one file."""
    images = tensor.detach().float().cpu()
    if normalize:
        images = (images - images.min()) / (images.max() - images.min()).clamp(min=1e-5)
    rows = [torch.cat(list(part), dim=-1) for part in images.split(nrow) if len(part) == nrow]
    grid = torch.cat(rows or list(images), dim=-2).clamp(0, 1).mul(255).byte().permute(1, 2, 0)
    Image.fromarray(grid.numpy().squeeze()).save(file)
