"""Trains a tiny GPT-2 with Hugging Face's Trainer, accumulating gradients over two batches.

Shows: a framework's loop needs nothing either: one step per optimizer step (two micro-steps each),
and the Trainer's evaluation kept apart. The model starts from random numbers, nothing is
downloaded. Expected verdict: no finding, or the Trainer's own overhead as "other".

    haiprof examples/trainer_loop.py --steps 100
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WORDS = 64
LENGTH = 48


class Counting(Dataset):
    """Sequences that count up by a constant, modulo WORDS."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(0, WORDS, (count, 1), generator=generator)
        stride = torch.randint(1, 8, (count, 1), generator=generator)
        self.words = (first + stride * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence, as input and as what is to be predicted."""
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Losses(TrainerCallback):
    """Keeps and prints the losses that the Trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Takes one log entry of the Trainer."""
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            if state.global_step % 10 == 0:
                print(f"step {state.global_step} loss {self.losses[-1]:.4f}", flush=True)
        if "eval_loss" in logs:
            print(f"step {state.global_step} held-out loss {float(logs['eval_loss']):.4f}")


def arguments(options: argparse.Namespace, folder: str) -> TrainingArguments:
    """What the Trainer is told: no files but in `folder`, no reports, no progress bar."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        eval_strategy="steps",
        eval_steps=options.eval_every,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
        seed=options.seed,
    )


def train(options: argparse.Namespace, folder: str) -> tuple[torch.nn.Module, list[float]]:
    """Runs the Trainer."""
    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    kept = Losses()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments(options, folder),
        train_dataset=Counting(2048, options.seed),
        eval_dataset=Counting(64, options.seed + 1),
        callbacks=[kept],
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    trainer.train()
    return trainer.model, kept.losses


def main() -> None:
    """Reads the options, trains, prints the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write final weights and losses here")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model, losses = train(options, folder)
    print(f"total {len(losses)} steps, last loss {losses[-1]:.4f}")
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if options.save:
        torch.save({"weights": model.state_dict(), "losses": losses}, options.save)


if __name__ == "__main__":
    main()
