"""ResNet-18 and the features of VGG-16, both of a quarter of the width, untrained."""

# ruff: noqa: D102, N812

from __future__ import annotations

from types import SimpleNamespace

from torch import nn
from torch.nn import functional as F

VGG16_Weights = SimpleNamespace(IMAGENET1K_V1=None)
WIDTH = 16


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """Of four stages with two blocks each."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for stage in range(4):
            after = WIDTH << stage
            blocks = (_Block(before, after, 2 if stage else 1), _Block(after, after, 1))
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            before = after
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(before, num_classes)

    def forward(self, x):
        for name, part in self.named_children():
            x = part(x.flatten(1) if name == "fc" else x)
        return x


def resnet18(weights=None, pretrained=False, num_classes=1000):
    return ResNet(num_classes)


def vgg16(weights=None):
    layers, before = [], 3
    for width in (16, 16, 0, 32, 32, 0, 64, 64, 64, 0, 128, 128, 128):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
    return SimpleNamespace(features=nn.Sequential(*layers))
