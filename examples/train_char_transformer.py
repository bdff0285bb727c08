"""Trains a character-level transformer on sums that it writes itself: an ordinary, healthy loop.

Shows: the five phases of a plain loop (DataLoader, AdamW, clipping), and evaluation kept apart from
training. Expected verdict: no finding; forward about half of backward.

    haiprof examples/train_char_transformer.py --steps 200
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CHARACTERS = "\n 0123456789+="
CONTEXT = 64


def sums(count: int, generator: torch.Generator) -> str:
    """Lines such as `27 + 58 = 85`, from a seeded generator."""
    pairs = torch.randint(0, 100, (count, 2), generator=generator).tolist()
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs)


def windows(text: str) -> TensorDataset:
    """Overlapping windows of the text: CONTEXT characters, and the ones that follow each."""
    codes = torch.tensor([CHARACTERS.index(character) for character in text])
    rows = codes.unfold(0, CONTEXT + 1, CONTEXT // 4)
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, length, width = x.shape
        mixed = self.project_in(self.norm_attention(x))
        query, key, value = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm_perceptron(x))


class CharTransformer(nn.Module):
    """A decoder-only transformer over the characters of the text."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, codes: Tensor) -> Tensor:
        """Character codes (batch, time) to logits (batch, time, characters)."""
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.blocks(self.characters(codes) + self.positions(places)))


def loss_of(model: nn.Module, batch: list[Tensor], device: torch.device) -> Tensor:
    """Cross entropy of the next character."""
    codes, following = (part.to(device) for part in batch)
    return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Mean loss over held-out text."""
    model.eval()
    losses = [loss_of(model, batch, device).item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def train(options: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """Runs the loop for the number of steps asked for."""
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    training = windows(sums(4000, generator))
    loader = DataLoader(
        training, batch_size=options.batch, shuffle=True, drop_last=True, generator=generator
    )
    held_out = DataLoader(windows(sums(100, generator)), batch_size=options.batch)
    model = CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in loader:
            loss = loss_of(model, batch, device)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"step {len(losses)} loss {losses[-1]:.4f}")
            if len(losses) % options.eval_every == 0:
                print(f"step {len(losses)} held-out loss {evaluate(model, held_out, device):.4f}")
            if len(losses) == options.steps:
                break
    return model, losses


def main() -> None:
    """Reads the options, trains, prints the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write final weights and losses here")
    options = parser.parse_args()
    started = time.perf_counter()
    model, losses = train(options)
    print(f"total {len(losses)} steps, last loss {losses[-1]:.4f}")
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if options.save:
        torch.save({"weights": model.state_dict(), "losses": losses}, options.save)


if __name__ == "__main__":
    main()
