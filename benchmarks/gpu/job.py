"""The jobs that gpu-check runs under haiprof: each a small loop with one property.

    python benchmarks/gpu/job.py KIND [--steps N] [--size N] [--seconds S] ...

It knows nothing of haiprof. The last line that it prints is JSON: what it saw itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu.device import Gpu, busy_wait, decoder, mean_us, open_gpu, products, timed

Facts = dict[str, Any]


def tiny(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Kernels shorter than their launches."""
    step = decoder(gpu, layers=options.size, width=64, tokens=8)
    return {"step_us": mean_us(gpu, step, options.steps)}


def waits(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Each step copies its batch from pageable memory, and asks for the loss in its middle."""
    torch = gpu.torch
    step = products(gpu, width=options.size)
    batch = torch.randn(options.size * 16, options.size)
    for _ in range(options.steps):
        gpu.copy(batch)
        gpu.value(step())
        busy_wait(0.003)  # what is done with it: a line for a log
    return {"loss": gpu.value(step())}


def matrix(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Matrix products alone, in full precision or as TF32."""
    gpu.torch.set_float32_matmul_precision(options.precision)
    step = products(gpu, width=options.size)
    return {"step_us": mean_us(gpu, step, options.steps)}


def loader(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Batches that take longer to make than to train on."""
    torch = gpu.torch
    model = torch.nn.Linear(256, 256).to(gpu.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    class Slow(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return options.steps * 4

        def __getitem__(self, index: int) -> Any:
            busy_wait(0.002)
            return torch.full((256,), float(index))

    for batch in torch.utils.data.DataLoader(Slow(), batch_size=4):
        loss = model(gpu.copy(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": gpu.value(loss)}


def left_on_cpu(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """The published case: neighbourhoods worked out on the CPU, one sample after another."""
    from examples import cpu_bound_forward

    words = ["--device", gpu.device, "--seconds", str(options.seconds)]
    sys.argv = [sys.argv[0], *words, "--steps", str(options.steps)]
    cpu_bound_forward.main()
    return {}


def out_of_memory(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Trains, and takes a little more memory in each step until there is none."""
    torch = gpu.torch
    torch.cuda.set_per_process_memory_fraction(options.share)
    step = products(gpu, width=options.size)
    taken = []
    size = max(int(options.share * torch.cuda.mem_get_info()[1]) // options.steps, 1 << 20)
    while True:
        step()
        taken.append(gpu.block(size))


def plain(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """A loop that does nothing unusual for some seconds."""
    step = products(gpu, width=options.size)
    until, count = time.monotonic() + options.seconds, 0
    while time.monotonic() < until or count < options.steps:
        step()
        count += 1
        if count % 20 == 0:
            gpu.torch.cuda.synchronize()
    return {"count": count, "loss": gpu.value(step()).hex()}


def profiled(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """A user's own profiler: waits, warms up, records, at the steps that haiprof was asked for."""
    torch = gpu.torch
    activity = torch.profiler.ProfilerActivity
    step = products(gpu, width=options.size)
    found: list[int] = []

    def ready(profiler: Any) -> None:
        path = Path(tempfile.mkdtemp(dir=".")) / "own.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
        found.append(sum(e.get("cat") == "kernel" for e in events))

    with torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA], on_trace_ready=ready,
        schedule=torch.profiler.schedule(wait=8, warmup=3, active=3, repeat=1),
    ) as profiler:  # fmt: skip
        for _ in range(options.steps):
            step()
            profiler.step()
    return {"own_kernels": found, "loss": gpu.value(step()).hex()}


# -- losses that must be the same ------------------------------------------------------------------


def training(gpu: Gpu, options: argparse.Namespace) -> Facts:
    """Every way of training after the other, in one process group of one rank."""
    torch = gpu.torch
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group(gpu.backend, store=store, rank=0, world_size=1)
    facts: Facts = {"losses": {}, "steps": {}, "failed": {}, "forwards": 0, "scaled": 0}
    for train in (plain_net, data_parallel, sharded, recomputed, mixed):
        torch.manual_seed(7)
        try:
            losses, steps = train(gpu, options)
        except Exception as error:  # noqa: BLE001  one way must not cost the others
            facts["failed"][train.__name__] = repr(error)[:400]
            continue
        facts["losses"][train.__name__] = [gpu.value(loss).hex() for loss in losses]
        facts["steps"][train.__name__] = steps
        facts["forwards"] += len(losses)
        facts["scaled"] += len(losses) if train is mixed else 0
    step = products(gpu, width=options.size)
    timed(gpu, step, 3)
    facts["step_us"] = statistics.median(timed(gpu, step, options.steps))
    facts["steps"]["timed"] = options.steps + 3
    facts["forwards"] += options.steps + 3
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return facts


def net(gpu: Gpu, width: int) -> Any:
    """Four blocks."""
    nn = gpu.torch.nn
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks).to(gpu.device)


def trained(gpu: Gpu, model: Any, options: argparse.Namespace) -> tuple[list[Any], int]:
    """Losses of so many steps, and how many steps that were."""
    torch = gpu.torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(options.steps):
        x = torch.randn(16, options.size, device=gpu.device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, options.steps


def plain_net(gpu: Gpu, options: argparse.Namespace) -> tuple[list[Any], int]:
    """As it is."""
    return trained(gpu, net(gpu, options.size), options)


def data_parallel(gpu: Gpu, options: argparse.Namespace) -> tuple[list[Any], int]:
    """DistributedDataParallel."""
    model = gpu.torch.nn.parallel.DistributedDataParallel(net(gpu, options.size))
    return trained(gpu, model, options)


def sharded(gpu: Gpu, options: argparse.Namespace) -> tuple[list[Any], int]:
    """FSDP2."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.5
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(gpu.device, (1,))
    model = net(gpu, options.size)
    for block in model:
        fully_shard(block, mesh=mesh)
    return trained(gpu, fully_shard(model, mesh=mesh), options)


def recomputed(gpu: Gpu, options: argparse.Namespace) -> tuple[list[Any], int]:
    """Activation checkpointing: each block's forward runs again in backward."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(gpu.torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = net(gpu, options.size)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return trained(gpu, Checkpointed(), options)


def mixed(gpu: Gpu, options: argparse.Namespace) -> tuple[list[Any], int]:
    """Automatic mixed precision; every fifth step has an infinite gradient and is skipped."""
    torch = gpu.torch
    model, scaler = net(gpu, options.size), gpu.scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for number in range(options.steps):
        x = torch.randn(16, options.size, device=gpu.device)
        with torch.autocast(gpu.device, dtype=gpu.half):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if number % 5 == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses, options.steps - options.steps // 5


KINDS = {
    "tiny": tiny, "waits": waits, "matrix": matrix, "loader": loader, "left_on_cpu": left_on_cpu,
    "out_of_memory": out_of_memory, "plain": plain, "profiled": profiled, "training": training,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--precision", default="highest")
    parser.add_argument("--share", type=float, default=0.05, help="of the memory of the device")
    options = parser.parse_args()
    print(json.dumps(KINDS[options.kind](open_gpu(), options)), flush=True)


if __name__ == "__main__":
    main()
