"""Trains a small regressor with Lightning's Trainer, which runs each batch inside optimizer.step.

Shows: with a closure, forward and backward happen inside the optimizer's step; haiprof still tells
them apart, and keeps Lightning's validation out of the training steps.
Expected verdict: no slow phase, Lightning's own bookkeeping between the phases as "other".

    haiprof examples/lightning_loop.py --steps 200
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

INPUTS = 32


def samples(count: int, seed: int) -> TensorDataset:
    """Inputs (count, INPUTS), and a smooth function of them in noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    y = x[:, :4].sin().sum(1, keepdim=True) + x[:, 4:6].prod(1, keepdim=True)
    return TensorDataset(x, y + 0.05 * torch.randn(y.shape, generator=generator))


class Regressor(lightning.LightningModule):
    """A perceptron, and how Lightning is to train it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.net = nn.Sequential(
            nn.Linear(INPUTS, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error of one batch."""
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch, kept and printed."""
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if len(self.losses) % 10 == 0:
            print(f"step {len(self.losses)} loss {self.losses[-1]:.4f}", flush=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """One held-out batch."""
        self.log("held_out_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        """Prints the held-out loss."""
        held_out = float(self.trainer.callback_metrics["held_out_loss"])
        print(f"step {len(self.losses)} held-out loss {held_out:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(options: argparse.Namespace, folder: str) -> Regressor:
    """Runs Lightning's Trainer; whatever it writes goes to `folder`."""
    lightning.seed_everything(options.seed, verbose=False)
    model = Regressor()
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator=options.device,
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=options.eval_every,
        check_val_every_n_epoch=None,
    )
    loader = DataLoader(samples(4096, options.seed), batch_size=64, shuffle=True)
    trainer.fit(model, loader, DataLoader(samples(256, options.seed + 1), batch_size=64))
    return model


def main() -> None:
    """Reads the options, trains, prints the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write final weights and losses here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = train(options, folder)
    print(f"total {len(model.losses)} steps, last loss {model.losses[-1]:.4f}")
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if options.save:
        torch.save({"weights": model.state_dict(), "losses": model.losses}, options.save)


if __name__ == "__main__":
    main()
