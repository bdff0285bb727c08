"""Kinds of job: what is wrong with each, or what shape a healthy one has; pieces of code by place.

A line that ends in `# FAULT` is the one that a finding should name. Pieces use `LOSE` (seconds a
fault takes in a step) and `TURNS` (as many turns of a Python loop). `every` places hold text that
draw.py puts where job.py says `# <place>`.
"""

# ruff: noqa: E501 - a table of code

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANY = ("plain", "plain", "plain", "plain", "trainer", "lightning", "accelerate")
LOOPS = ("plain", "plain", "plain", "accelerate")
PLAIN = ("plain",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault, or of healthy job."""

    name: str
    accepted: tuple[str, ...] = ()
    """Slugs, or `slug/cause`, one of which must come first; empty: healthy."""
    pieces: Mapping[str, str] = field(default_factory=dict)
    """Code by place of job.py."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Constants of job.py."""
    ranks: tuple[int, ...] = (1, 1, 2)
    """One of these is drawn."""
    styles: tuple[str, ...] = ANY
    families: tuple[str, ...] = ()
    """Empty: any."""
    workers: tuple[int, ...] = (0, 0, 1)
    magnitudes: tuple[float, float] = (0.15, 5.0)
    """Of a step, the least and the most that is drawn."""
    rank: str = ""
    """`first` or `last`: the rank that the finding must name."""
    seconds: float = 7.0
    beside: str = ""
    """`neighbours`: four busy processes from the start; `late`: from the middle on."""
    under: str = ""
    """`one_core`, or `quota`: half a core."""
    threads: int = 1
    work: int = 1
    """Times over that its model works on a batch, besides what work.py finds: a step of this kind
    is so much shorter than a usual one, and its loader would have a tenth of it."""
    options: tuple[str, ...] = ()
    """Of haiprof."""


BURN = "with lost():\n    sum(i * i for i in range(TURNS))  # FAULT"
SLEEP = "with lost():\n    time.sleep(LOSE)  # FAULT"
EACH_BURN = "with lost():\n    sum(i * i for i in range(TURNS // BATCH + 1))  # FAULT"
EACH_SLEEP = "with lost():\n    time.sleep(max(LOSE / BATCH, 1e-4))  # FAULT"
LOADER = ("dataloader_bound",)
FORWARD, BACKWARD = ("forward_bound",), ("backward_bound",)
OPTIMIZER, OUTSIDE = ("optimizer_bound",), ("outside_the_model",)


def indented(code: str, by: int = 4) -> str:
    """The same lines further in."""
    return "\n".join(" " * by + line if line else line for line in code.split("\n"))


def when(condition: str, code: str) -> str:
    """Code under a condition."""
    return f"if {condition}:\n{indented(code)}"


def thread(body: str) -> str:
    """A daemon thread that does the same again and again."""
    return f"import threading\n\ndef refresh() -> None:\n    while True:\n{indented(indented(body))}\n\nthreading.Thread(target=refresh, daemon=True).start()"


def backwards(code: str, where: str) -> dict[str, str]:
    """Pieces of an autograd function that does something in its backward, before or after."""
    function = (
        "class Between(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x.view_as(x)\n\n    @staticmethod\n"
        f"    def backward(ctx, grad):\n{indented(code, 8)}\n        return grad\n"
    )
    return {"constants": function, where: "out = Between.apply(out)"}


FAULTS = (
    # the loader
    Kind(name="samples read from slow storage", accepted=LOADER, pieces={"item": EACH_SLEEP}, workers=(0,), magnitudes=(0.3, 5)),
    Kind(name="slow storage behind workers", accepted=LOADER, pieces={"item": EACH_SLEEP}, workers=(1, 2), magnitudes=(4, 8)),
    Kind(name="heavy transform without workers", accepted=LOADER, pieces={"item": EACH_BURN}, workers=(0,)),
    Kind(name="too few workers", accepted=LOADER, pieces={"item": EACH_BURN}, workers=(1,), magnitudes=(2, 5), ranks=(1,)),
    Kind(name="Python loops over a sample", accepted=LOADER, workers=(0,), pieces={"item": "with lost():\n    x = torch.stack([part * 1.0 for part in x.flatten()[: max(TURNS // (50 * BATCH), 2)]]).mean() + x  # FAULT"}, magnitudes=(0.5, 3)),
    Kind(name="JSON parsed per sample", accepted=LOADER, workers=(0,), pieces={"data_init": "self.text = json.dumps(list(range(max(TURNS // BATCH // 2, 10))))", "item": "with lost():\n    json.loads(self.text)  # FAULT"}),
    Kind(name="decompression per sample", accepted=LOADER, workers=(0,), pieces={"data_init": "import zlib\n\nself.packed = zlib.compress(os.urandom(max(TURNS * 8 // BATCH, 100)))\nself.unpack = zlib.decompress", "item": "with lost():\n    for _ in range(8):\n        self.unpack(self.packed)  # FAULT"}, magnitudes=(0.5, 5)),
    Kind(name="retries of reads", accepted=LOADER, workers=(0, 2), pieces={"item": "with lost():\n    for _ in range(3):\n        time.sleep(LOSE / BATCH / 3)  # FAULT"}, magnitudes=(3, 6)),
    Kind(name="file opened per sample", accepted=LOADER, workers=(0,), pieces={"data_init": "self.file = FOLDER / 'samples.bin'\nself.file.write_bytes(bytes(1 << 16))", "item": "with lost(), self.file.open('rb') as file:\n    file.read()\n    time.sleep(LOSE / BATCH)  # FAULT"}, magnitudes=(0.5, 4)),
    Kind(name="few slow samples", accepted=("dataloader_bound", "jitter/dataloader"), pieces={"item": "if index % 499 == 7:\n    with lost():\n        time.sleep(LOSE * 10)  # FAULT"}, magnitudes=(2, 5), workers=(0, 2)),
    Kind(name="slow collate", accepted=LOADER, pieces={"collate": BURN}, workers=(0,)),
    Kind(name="slow collate in a worker", accepted=LOADER, pieces={"collate": BURN}, workers=(1,), magnitudes=(2.5, 5), ranks=(1,)),
    Kind(name="collate that waits", accepted=LOADER, pieces={"collate": SLEEP}, workers=(0,)),
    Kind(name="workers start each epoch", accepted=("dataloader_bound/epoch_restart",), constants={"PERSISTENT": False}, pieces={"constants": "LENGTH = BATCH * 30"}, workers=(2,), styles=PLAIN, ranks=(1,)),
    Kind(name="first batch", accepted=("first_batch",), pieces={"item": "if self.calls == 1 and index >= 0:\n    with lost():\n        time.sleep(4.0)  # FAULT"}, workers=(0,), seconds=10),
    Kind(name="slow sampler", accepted=LOADER, workers=(0,), styles=PLAIN, pieces={"constants": "class Slow(torch.utils.data.RandomSampler):\n    def __iter__(self):\n        for place, index in enumerate(super().__iter__()):\n            if place % BATCH == 0:\n                with lost():\n                    sum(i * i for i in range(TURNS))  # FAULT\n            yield index", "loader": "return DataLoader(data, batch_size=BATCH, sampler=Slow(data), drop_last=True, collate_fn=collate)"}),
    Kind(name="iterable dataset that waits", accepted=LOADER, workers=(0,), styles=PLAIN, ranks=(1,), pieces={"constants": "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        data = Samples()\n        for index in range(LENGTH):\n            with lost():\n                time.sleep(max(LOSE / BATCH, 1e-4))  # FAULT\n            yield data[index]", "loader": "return DataLoader(Stream(), batch_size=BATCH, drop_last=True)"}, magnitudes=(0.5, 5)),
    # forward
    Kind(name="wait in forward", accepted=FORWARD, pieces={"forward": SLEEP}, magnitudes=(1, 5)),
    Kind(name="Python in forward", accepted=FORWARD, pieces={"forward": BURN}, magnitudes=(1, 5)),
    Kind(name="small share of Python in forward", accepted=FORWARD, pieces={"forward": BURN}, magnitudes=(0.15, 0.6)),
    Kind(name="forward hook", accepted=FORWARD, pieces={"model_init": "self.inner.head.register_forward_hook(slow_hook)", "constants": "def slow_hook(*_):\n" + indented(BURN)}, magnitudes=(1, 5)),
    Kind(name="numpy round trip in forward", accepted=FORWARD, pieces={"forward": "import numpy as np\n\nwith lost():\n    for _ in range(max(TURNS // 4000, 1)):\n        np.sort(x.detach().numpy().reshape(-1)[:4096])  # FAULT"}, magnitudes=(1, 4)),
    Kind(name="loop over elements in forward", accepted=("forward_bound", "host_bound", "garbage_collection"), pieces={"forward": "with lost():\n    for value in x.detach().flatten()[: max(TURNS // 40, 4)]:  # FAULT\n        float(value)  # FAULT"}, magnitudes=(1, 4)),
    Kind(name="augmentation in forward", accepted=FORWARD, pieces={"forward": "with lost(), torch.no_grad():\n    for _ in range(max(TURNS // 3000, 1)):\n        x = x.roll(1, 0)\n    [math_of(i) for i in range(TURNS // 2)]  # FAULT", "constants": "def math_of(i):\n    return i * i % 7"}, magnitudes=(1, 4)),
    Kind(name="printing in forward", accepted=FORWARD, pieces={"forward": "with lost(), (FOLDER / 'debug.txt').open('w') as file:\n    for i in range(max(TURNS // 6, 1)):\n        print(i, file=file)  # FAULT"}, magnitudes=(1, 4)),
    # backward
    Kind(name="wait in backward", accepted=BACKWARD, pieces=backwards(SLEEP, "after_forward"), magnitudes=(3, 6)),
    Kind(name="Python in backward", accepted=BACKWARD, pieces=backwards(BURN, "after_forward"), magnitudes=(3, 6)),
    Kind(name="gradient hooks", accepted=BACKWARD, pieces={"model_init": "self.inner.head.weight.register_hook(slow_hook)", "constants": "def slow_hook(grad):\n" + indented(BURN) + "\n    return grad"}, magnitudes=(3, 6)),
    Kind(name="full backward hook", accepted=BACKWARD, pieces={"model_init": "self.inner.head.register_full_backward_hook(slow_hook)", "constants": "def slow_hook(*_):\n" + indented(BURN)}, magnitudes=(3, 6)),
    Kind(name="hook behind accumulated gradients", accepted=BACKWARD, pieces={"before_training": "next(model.parameters()).register_post_accumulate_grad_hook(slow_hook)", "constants": "def slow_hook(_):\n" + indented(BURN)}, magnitudes=(3, 6)),
    # the optimizer
    Kind(name="optimizer in Python", accepted=OPTIMIZER, pieces={"optimizer": "kind = Slow", "constants": "class Slow(torch.optim.AdamW):\n    def step(self, closure=None):\n" + indented(BURN, 8) + "\n        return super().step(closure)"}, magnitudes=(1.5, 5)),
    Kind(name="optimizer that waits", accepted=OPTIMIZER, pieces={"optimizer": "kind = Slow", "constants": "class Slow(torch.optim.AdamW):\n    def step(self, closure=None):\n" + indented(SLEEP, 8) + "\n        return super().step(closure)"}, magnitudes=(1.5, 5)),
    Kind(name="hook behind the optimizer", accepted=("optimizer_bound", "outside_the_model"), pieces={"before_training": "optimizer.register_step_post_hook(slow_hook)", "constants": "def slow_hook(*_):\n" + indented(BURN)}, magnitudes=(1.5, 5)),
    Kind(name="optimizer over a large dense embedding", accepted=OPTIMIZER, pieces={"model_init": "self.large = nn.Embedding(60_000, 64)", "forward": "x = x + 0.0 * self.large.weight[self.calls % 100].mean()"}, families=("cnn", "lstm", "graph", "unet"), ranks=(1,), constants={"WORK": 1}),
    # outside
    Kind(name="wait between steps", accepted=OUTSIDE, pieces={"after_step": SLEEP}, magnitudes=(0.6, 5)),
    Kind(name="metric in Python", accepted=OUTSIDE, pieces={"after_step": BURN}, magnitudes=(0.6, 5)),
    Kind(name="small metric in Python", accepted=OUTSIDE, pieces={"after_step": BURN}, magnitudes=(0.15, 0.6)),
    Kind(name="gradient norms one by one", accepted=OUTSIDE, styles=LOOPS, pieces={"before_update": "with lost():\n    for _ in range(max(TURNS // 2500, 1)):\n        for p in model.parameters():\n            p.grad.norm().item()  # FAULT"}, magnitudes=(0.6, 3)),
    Kind(name="clipping in Python", accepted=OUTSIDE, styles=LOOPS, pieces={"before_update": BURN}, magnitudes=(0.6, 5)),
    Kind(name="log file flushed each step", accepted=OUTSIDE, pieces={"after_step": "with lost(), (FOLDER / 'log.txt').open('a') as file:\n    file.write(f'step {step}')\n    os.fsync(file.fileno())\n    time.sleep(LOSE)  # FAULT"}, magnitudes=(0.6, 4)),
    Kind(name="state copied each step", accepted=OUTSIDE, pieces={"after_step": "import copy\n\nwith lost():\n    for _ in range(max(TURNS // 30_000, 1)):\n        copy.deepcopy(model.state_dict())  # FAULT"}, families=("mlp", "transformer", "vit"), magnitudes=(1, 4)),
    Kind(name="process started each step", accepted=OUTSIDE, pieces={"after_step": "import subprocess\n\nwith lost():\n    subprocess.run(['sleep', str(LOSE)], check=False)  # FAULT"}, magnitudes=(0.6, 3)),
    Kind(name="average of weights in Python", accepted=OUTSIDE, pieces={"after_step": "with lost(), torch.no_grad():\n    for p in model.parameters():\n        p.add_(0.0)\n    sum(i * i for i in range(TURNS))  # FAULT"}, magnitudes=(0.8, 4)),
    Kind(name="batches made by hand", accepted=OUTSIDE, styles=PLAIN, constants={"LOADER": False}, pieces={"batch": BURN}, magnitudes=(0.8, 4)),
    Kind(name="objects gathered each step", accepted=("blocking_collectives", "outside_the_model", "late_rank"), styles=PLAIN, ranks=(2,), pieces={"after_step": "with lost():\n    for _ in range(max(int(LOSE * 500), 1)):\n        dist.all_gather_object([None] * WORLD, {'loss': 1.0})  # FAULT"}, magnitudes=(2, 5)),
    # beside steps
    Kind(name="checkpoints", accepted=("checkpoint_stalls",), pieces={"after_step": "if step % 8 == 0:\n    with lost():\n        weights = [torch.zeros(1 << 19) for _ in range(max(int(LOSE * 1200), 4))]\n        torch.save({'model': model.state_dict(), 'more': weights}, FOLDER / 'c.pt')  # FAULT"}, magnitudes=(1, 4)),
    Kind(name="checkpoints of rank 0", accepted=("checkpoint_stalls",), styles=PLAIN, ranks=(2,), pieces={"after_step": "if step % 8 == 0 and RANK == 0:\n    with lost():\n        weights = [torch.zeros(1 << 19) for _ in range(max(int(LOSE * 1200), 4))]\n        torch.save({'model': model.state_dict(), 'more': weights}, FOLDER / 'c.pt')  # FAULT"}, magnitudes=(1, 4)),
    Kind(name="heavy evaluation", accepted=("evaluation_heavy",), styles=LOOPS, ranks=(1,), pieces={"after_step": "if step % 20 == 0:\n    with lost():\n        evaluate(model, max(int(60 * LOSE / 0.02), 20))  # FAULT"}, magnitudes=(0.8, 3)),
    Kind(name="explicit collections", accepted=("garbage_collection",), pieces={"constants": "import gc", "before_training": "KEPT.extend([i] for i in range(int(LOSE * 1.5e7)))", "after_step": "with lost():\n    gc.collect()  # FAULT"}, magnitudes=(0.3, 2)),
    Kind(name="collections now and then", accepted=("garbage_collection", "jitter/gc"), pieces={"constants": "import gc", "before_training": "KEPT.extend([i] for i in range(int(LOSE * 1.5e7)))", "after_step": "if step % 10 == 0:\n    with lost():\n        gc.collect()  # FAULT"}, magnitudes=(3, 6)),
    Kind(name="reference cycles", accepted=("garbage_collection", "outside_the_model"), pieces={"constants": "class Node:\n    def __init__(self):\n        self.me, self.load = self, [[] for _ in range(20)]", "after_step": "with lost():\n    KEPT.append([Node() for _ in range(max(int(LOSE * 2e4), 50))])  # FAULT\n    del KEPT[:-100]"}, magnitudes=(1, 3)),
    # over time
    Kind(name="drift in forward", accepted=("step_time_drift",), pieces={"forward": "with lost():\n    time.sleep(LOSE * min(self.calls / 300, 1.5))  # FAULT"}, magnitudes=(0.8, 2), seconds=11),
    Kind(name="drift in the loader", accepted=("step_time_drift",), workers=(0,), pieces={"collate": "KEPT.append(1)\nwith lost():\n    time.sleep(LOSE * min(len(KEPT) / 300, 1.5))  # FAULT"}, magnitudes=(0.8, 2), seconds=11),
    Kind(name="history written whole", accepted=("step_time_drift", "outside_the_model"), pieces={"after_step": "with lost():\n    KEPT.append(list(range(200)))\n    json.dumps(KEPT[:: max(1, int(0.02 / LOSE))])  # FAULT"}, magnitudes=(0.5, 2), seconds=11),
    Kind(name="sudden regression", accepted=("step_time_drift",), pieces={"forward": "if self.calls > 120:\n    with lost():\n        sum(i * i for i in range(TURNS))  # FAULT"}, magnitudes=(0.5, 2), seconds=12),
    Kind(name="regression of the optimizer", accepted=("step_time_drift",), pieces={"optimizer": "kind = Slow", "constants": "class Slow(torch.optim.AdamW):\n    def step(self, closure=None):\n        KEPT.append(1)\n        if len(KEPT) > 120:\n" + indented(SLEEP, 12) + "\n        return super().step(closure)"}, magnitudes=(0.6, 2), seconds=12),
    Kind(name="memory creep", accepted=("memory_creep",), pieces={"after_step": "KEPT.append(torch.ones(int(LOSE * 4e7)))"}, magnitudes=(0.8, 1.5), seconds=12, ranks=(1,)),
    Kind(name="jitter in forward", accepted=("jitter",), pieces={"forward": "if DICE.random() < 0.05:\n    with lost():\n        time.sleep(LOSE)  # FAULT"}, magnitudes=(5, 8), seconds=11),
    Kind(name="jitter between steps", accepted=("jitter",), pieces={"after_step": "if step % 20 == 0:\n    with lost():\n        sum(i * i for i in range(TURNS))  # FAULT"}, magnitudes=(5, 10), seconds=11),
    Kind(name="recompiles", accepted=("recompiles",), styles=PLAIN, ranks=(1,), families=("transformer", "mlp", "recommender"), constants={"LOADER": False}, pieces={"model": "torch._dynamo.config.recompile_limit = 10_000\ntorch._dynamo.config.accumulated_recompile_limit = 10_000\nmodel.inner = torch.compile(model.inner, backend='eager', dynamic=False)", "batch": "count = 3 + step % 100\nx, y = x.repeat(4, *[1] * (x.dim() - 1))[:count], y.repeat(4)[:count]", "forward": "out = self.inner(x)  # FAULT\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}, seconds=12),
    # the machine
    Kind(name="busy neighbours", accepted=("busy_neighbours",), beside="neighbours", ranks=(1, 2), styles=PLAIN),
    Kind(name="neighbours come later", accepted=("busy_neighbours",), beside="late", ranks=(1,), styles=PLAIN, seconds=14),
    Kind(name="CPU quota", accepted=("cpu_throttled",), under="quota", ranks=(1,), styles=PLAIN, seconds=12),
    Kind(name="one core for training and a worker", accepted=("too_few_cores", "shared_cores"), under="one_core", pieces={"item": EACH_BURN}, workers=(1, 2), ranks=(1,), styles=PLAIN, magnitudes=(1, 2), seconds=12),
    Kind(name="two ranks on one core", accepted=("shared_cores",), under="one_core", ranks=(2,), styles=PLAIN),
    Kind(name="too many threads", accepted=("shared_cores", "too_few_cores", "threads_over_cores"), constants={"THREADS": 4}, ranks=(2,), styles=PLAIN, families=("cnn", "unet", "transformer"), threads=4),
    Kind(name="tiny operators", accepted=("host_bound", "forward_bound"), constants={"THREADS": 0, "WORK": 1}, styles=PLAIN, ranks=(1,), families=("lstm",), threads=0, pieces={"forward": "scale, row = self.inner.head.weight.mean() * 0 + 1, x[0, 0]\nfor _ in range(1500):\n    row = row * scale  # FAULT\nx = x + 0.0 * row"}, options=("--steps", "60:63")),
    # ranks
    Kind(name="slow rank: loader", accepted=("ranks_uneven", "late_rank"), rank="last", ranks=(2,), styles=LOOPS, workers=(0,), pieces={"collate": when("LAST", SLEEP)}, magnitudes=(0.4, 3)),
    Kind(name="slow rank: forward", accepted=("ranks_uneven", "late_rank"), rank="last", ranks=(2,), styles=LOOPS, pieces={"forward": when("LAST", BURN)}, magnitudes=(0.4, 3)),
    Kind(name="slow rank: backward", accepted=("late_rank", "ranks_uneven"), rank="last", ranks=(2,), styles=PLAIN, pieces=backwards(when("LAST", SLEEP), "after_forward"), magnitudes=(0.6, 3)),
    Kind(name="slow rank: optimizer", accepted=("ranks_uneven", "late_rank"), rank="last", ranks=(2,), styles=PLAIN, pieces={"optimizer": "kind = Slow", "constants": "class Slow(torch.optim.AdamW):\n    def step(self, closure=None):\n" + indented(when("LAST", BURN), 8) + "\n        return super().step(closure)"}, magnitudes=(0.4, 3)),
    Kind(name="rank 0 logs alone", accepted=("ranks_uneven", "late_rank"), rank="first", ranks=(2,), styles=LOOPS, pieces={"after_step": when("RANK == 0", SLEEP)}, magnitudes=(0.4, 3)),
    Kind(name="rank 0 evaluates alone", accepted=("evaluation_heavy",), rank="first", ranks=(2,), styles=PLAIN, pieces={"after_step": "if RANK == 0 and step % 20 == 0:\n    with lost():\n        evaluate(model.module, max(int(60 * LOSE / 0.02), 20))  # FAULT"}, magnitudes=(0.8, 3)),
    Kind(name="rank 0 prepares and broadcasts", accepted=("ranks_uneven", "late_rank", "outside_the_model"), rank="first", ranks=(2,), styles=PLAIN, constants={"LOADER": False}, pieces={"batch": "with lost():\n    if RANK == 0:\n        sum(i * i for i in range(TURNS))  # FAULT\n    dist.broadcast(x, 0)"}, magnitudes=(0.6, 3)),
    Kind(name="one rank has more data", accepted=("ranks_uneven", "late_rank"), rank="last", ranks=(2,), styles=PLAIN, pieces={"batch": when("LAST", "x, y = x.repeat_interleave(3, 0), y.repeat_interleave(3, 0)")}),
    Kind(name="ranks' data uneven by turns", accepted=("data_imbalance",), ranks=(2,), styles=PLAIN, pieces={"batch": when("(step + RANK) % WORLD == 0", "times = DICE.choice((3, 4))\nx, y = x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)")}),
    # other threads of Python: what the loop loses to them is not its own to count
    Kind(name="thread that loops in Python", accepted=("interpreter_lock",), styles=LOOPS, pieces={"before_training": thread("sum(i * i for i in range(20_000))  # FAULT")}),
    Kind(name="thread in long calls", accepted=("interpreter_lock",), styles=LOOPS, pieces={"before_training": "import re\n\n" + thread('re.match("(a|aa)+$", "a" * 29 + "!")  # FAULT\ntime.sleep(0.02)')}),
    # settings
    Kind(name="anomaly detection", accepted=("anomaly_detection", "backward_bound", "forward_bound", "costly_settings"), pieces={"setup": "torch.autograd.set_detect_anomaly(True)"}, ranks=(1,), families=("transformer", "lstm", "graph"), styles=PLAIN),
    Kind(name="profiler left on", accepted=("profiler_left_on", "outside_the_model"), pieces={"before_training": "profiler = torch.profiler.profile(with_stack=True)\nprofiler.start()\nimport atexit\n\natexit.register(profiler.stop)  # torch 2.13 crashes at exit without"}, ranks=(1,), styles=PLAIN, seconds=7),
    Kind(name="float64", accepted=("float64", "double_precision", "costly_settings"), pieces={"setup": "torch.set_default_dtype(torch.float64)"}, ranks=(1,), styles=PLAIN, families=("mlp", "unet", "graph")),
)  # fmt: skip

OWN = {"styles": PLAIN, "ranks": (1,)}


def loop(before: str, body: str) -> dict[str, str]:
    """A training loop of its own: what comes before it, and one step."""
    code = (
        f"loader = make_loader() if LOADER else None\n{before}\nfor x, y in batches(loader):\n{indented(body)}\n"
        "    step += 1\n    if over(step):\n        break"
    )
    return {"own": code, "constants": 'STYLE = "own"'}


STEP = "loss.backward()\noptimizer.step()\noptimizer.zero_grad()"
MODEL = "model = Net()\noptimizer = make_optimizer(model)\n"

HEALTHY = (
    Kind(name="plain"),
    Kind(name="all threads", constants={"THREADS": 0}, threads=0, ranks=(1,)),
    Kind(name="without loader", constants={"LOADER": False}, styles=PLAIN),
    Kind(name="one worker", workers=(1,)),
    Kind(name="two workers", workers=(2,), ranks=(1,)),
    Kind(name="long epochs, workers not kept", workers=(1,), constants={"PERSISTENT": False}, styles=PLAIN, pieces={"constants": "LENGTH = BATCH * 4000"}),
    Kind(name="accumulation", constants={"ACCUMULATE": 4}, styles=PLAIN),
    Kind(name="logging", pieces={"after_step": "if step % 10 == 0 and RANK == 0:\n    print(f'step {step} loss {loss.item():.4f}', flush=True)"}),
    Kind(name="saving", pieces={"after_step": "if step % 100 == 0 and RANK == 0:\n    torch.save(model.state_dict(), FOLDER / 'healthy.pt')"}),
    Kind(name="evaluation", styles=LOOPS, pieces={"after_step": "if step % 50 == 0:\n    evaluate(model, 3)"}),
    Kind(name="clipping and a schedule", styles=LOOPS, pieces={"before_update": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"}),
    Kind(name="varying batches", styles=PLAIN, pieces={"batch": "count = max(1, int(len(x) * (1 - 0.3 * DICE.random())))\nx, y = x[:count], y[:count]"}, ranks=(1,)),
    Kind(name="variable lengths", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "length = DICE.randint(x.shape[1] // 3, x.shape[1])\nx = x[:, :length]"}),
    Kind(name="lengths in buckets", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "x = x[:, : x.shape[1] // DICE.choice((1, 2, 4))]"}),
    Kind(name="packed sequences", styles=PLAIN, families=("transformer",), pieces={"batch": "rows = DICE.choice((1, 2, 4))\ncount = len(x) // rows\nx, y = x[: count * rows].reshape(count, -1)[:, : x.shape[1] * rows], y[:count]"}),
    Kind(name="curriculum", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "stage = min(3, 1 + step // 120)\nx = x[:, : x.shape[1] * stage // 3]"}),
    Kind(name="alternating tasks", work=2, styles=PLAIN, pieces={"batch": "if step % 2:\n    x, y = x[: len(x) // 4], y[: len(y) // 4]"}),
    Kind(name="one large step in five", work=2, styles=PLAIN, pieces={"batch": "if step % 5:\n    x, y = x[: len(x) // 3], y[: len(y) // 3]"}),
    Kind(name="frozen backbone", work=3, ranks=(1,), pieces={"model_init": "for part in (self.inner.first, self.inner.last):\n    for p in part.parameters():\n        p.requires_grad_(False)"}),
    Kind(name="frozen backbone without gradients", work=3, ranks=(1,), families=("mlp", "cnn"), pieces={"model_init": "for part in (self.inner.first, self.inner.last):\n    part.requires_grad_(False)", "forward": "with torch.no_grad():\n    x = self.inner.last(self.inner.first(x))\nout = self.inner.head(x)\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}),
    Kind(name="half frozen", pieces={"model_init": "for p in self.inner.first.parameters():\n    p.requires_grad_(False)"}),
    Kind(name="adapters", work=3, families=("mlp", "recommender", "unet"), ranks=(1,), pieces={"model_init": "for p in self.inner.parameters():\n    p.requires_grad_(False)\nself.adapter = nn.Linear(CLASSES, CLASSES)", "after_forward": "out = self.adapter(out)"}),
    Kind(name="teacher", **OWN, pieces=loop(MODEL + "teacher = FAMILIES[FAMILY]().eval()", "with torch.no_grad():\n    goal = teacher(x)\nloss = F.mse_loss(model(x), goal)\n" + STEP)),
    Kind(name="teacher inside", ranks=(1,), pieces={"model_init": "self.teacher = [FAMILIES[FAMILY]().eval()]", "after_forward": "with torch.no_grad():\n    goal = self.teacher[0](x)\nout = out + 0.0 * goal"}),
    Kind(name="average of weights", **OWN, pieces=loop(MODEL + "average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)", "loss = F.cross_entropy(model(x), y)\n" + STEP + "\naverage.update_parameters(model)")),
    Kind(name="momentum contrast", **OWN, pieces=loop(MODEL + "import copy\n\nkey = copy.deepcopy(model)", "with torch.no_grad():\n    for p, q in zip(key.parameters(), model.parameters(), strict=True):\n        p.lerp_(q, 0.01)\n    goal = key(x)\nloss = F.mse_loss(model(x), goal)\n" + STEP)),
    Kind(name="PPO", **OWN, pieces=loop(MODEL, "with torch.no_grad():\n    for _ in range(16):\n        model(x[: max(len(x) // 8, 1)]).argmax(-1)\nfor part in range(4):\n    loss = F.cross_entropy(model(x[part::4]), y[part::4])\n" + indented(STEP))),
    Kind(name="Q-learning with a target", **OWN, pieces=loop(MODEL + "target = Net()\ntarget.load_state_dict(model.state_dict())", "with torch.no_grad():\n    goal = target(x).amax(-1)\nloss = F.mse_loss(model(x).amax(-1), goal)\n" + STEP + "\nif step % 50 == 0:\n    target.load_state_dict(model.state_dict())")),
    Kind(name="LBFGS", **OWN, families=("mlp", "recommender", "unet"), pieces=loop("model = Net()\noptimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)", "def closure():\n    optimizer.zero_grad()\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    return loss\n\noptimizer.step(closure)")),
    Kind(name="GAN", **OWN, families=("mlp",), pieces=loop("make, judge = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)), Net()\nfirst = torch.optim.Adam(make.parameters(), lr=1e-4)\nsecond = torch.optim.Adam(judge.parameters(), lr=1e-4)", "fake = make(torch.randn(len(x), 64))\nsecond.zero_grad()\n(F.cross_entropy(judge(x), y) + F.cross_entropy(judge(fake.detach()), y)).backward()\nsecond.step()\nfirst.zero_grad()\nF.cross_entropy(judge(fake), y).backward()\nfirst.step()")),
    Kind(name="GAN, five to one", **OWN, families=("mlp",), pieces=loop("make, judge = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)), Net()\nfirst = torch.optim.Adam(make.parameters(), lr=1e-4)\nsecond = torch.optim.Adam(judge.parameters(), lr=1e-4)", "second.zero_grad()\nfake = make(torch.randn(len(x), 64)).detach()\n(judge(fake).mean() - judge(x).mean()).backward()\nsecond.step()\nif step % 5 == 0:\n    first.zero_grad()\n    (-judge(make(torch.randn(len(x), 64))).mean()).backward()\n    first.step()")),
    Kind(name="compiled", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='eager')"}),
    Kind(name="compiled, warm-up of shapes", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='aot_eager', dynamic=False)", "batch": "if step % 40 == 39:\n    x, y = x[: len(x) // 2], y[: len(y) // 2]"}),
    Kind(name="evaluation that compiles", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='aot_eager')\nevaluate(model, 2)", "after_step": "if step % 100 == 0:\n    evaluate(model, 3, BATCH // 2)"}),
    Kind(name="tiny model", **OWN, pieces=loop("model = nn.Linear(x_width(), CLASSES)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)", "loss = F.cross_entropy(model(x.flatten(1)), y)\n" + STEP) | {"constants": 'STYLE = "own"\n\n\ndef x_width():\n    width = 1\n    for size in FAMILIES[FAMILY].shape:\n        width *= size\n    return width'}, workers=(0,), constants={"LOADER": False}),
    Kind(name="bfloat16", styles=PLAIN, families=("mlp", "transformer", "recommender"), pieces={"forward": "with torch.autocast('cpu', torch.bfloat16):\n    out = self.inner(x).float()\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}),
    Kind(name="activation checkpoints", ranks=(1,), pieces={"forward": "import torch.utils.checkpoint\n\nout = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}, styles=PLAIN),
    Kind(name="two optimizers", **OWN, pieces=loop("model = Net()\nfirst = torch.optim.AdamW(model.inner.head.parameters(), lr=1e-4)\nsecond = torch.optim.SGD([*model.inner.first.parameters(), *model.inner.last.parameters()], lr=1e-3)", "loss = F.cross_entropy(model(x), y)\nloss.backward()\nfirst.step()\nsecond.step()\nfirst.zero_grad()\nsecond.zero_grad()")),
    Kind(name="sharpness-aware", **OWN, pieces=loop(MODEL, "F.cross_entropy(model(x), y).backward()\nwith torch.no_grad():\n    moved = [p.grad * 0.01 for p in model.parameters()]\n    torch._foreach_add_(list(model.parameters()), moved)\noptimizer.zero_grad()\nF.cross_entropy(model(x), y).backward()\nwith torch.no_grad():\n    torch._foreach_sub_(list(model.parameters()), moved)\noptimizer.step()\noptimizer.zero_grad()")),
    Kind(name="gradient penalty", **OWN, families=("mlp", "unet", "cnn"), pieces=loop(MODEL, "x.requires_grad_()\nout = model(x)\n(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\nloss = F.cross_entropy(out, y) + slope.pow(2).mean()\n" + STEP)),
    Kind(name="contrastive", **OWN, pieces=loop(MODEL, "one, two = F.normalize(model(x)), F.normalize(model(x + 0.1 * torch.randn_like(x)))\nloss = F.cross_entropy(one @ two.T, torch.arange(len(x)))\n" + STEP)),
    Kind(name="truncated backpropagation", **OWN, families=("lstm",), pieces=loop(MODEL, "for part in x.chunk(4, 1):\n    loss = F.cross_entropy(model(part), y)\n" + indented(STEP))),
    Kind(name="mixup", styles=PLAIN, pieces={"batch": "x = 0.7 * x + 0.3 * x.flip(0)"}),
    Kind(name="dropout sampling", ranks=(1,), styles=PLAIN, pieces={"after_forward": "out = (out + self.inner(x)) / 2"}),
    Kind(name="plain SGD", pieces={"optimizer": "kind = torch.optim.SGD"}),
    Kind(name="collector frozen", pieces={"setup": "import gc\n\ngc.freeze()\ngc.disable()", "after_step": "if step % 50 == 0:\n    import gc\n\n    gc.collect(1)"}),
    Kind(name="one collection", pieces={"before_training": "KEPT.extend([i] for i in range(4_000_000))", "after_step": "if step == 60:\n    import gc\n\n    gc.collect()"}),
    Kind(name="saving in a thread", styles=PLAIN, pieces={"after_step": "if step % 100 == 0 and RANK == 0:\n    import copy\n    import threading\n\n    state = copy.deepcopy(model.state_dict())\n    threading.Thread(target=torch.save, args=(state, FOLDER / 't.pt')).start()"}),
    Kind(name="short profile by the user", styles=PLAIN, ranks=(1,), pieces={"before_training": "KEPT.append(torch.profiler.profile())", "after_step": "if step == 30:\n    KEPT[0].start()\nif step == 33:\n    KEPT[0].stop()"}),
)  # fmt: skip
