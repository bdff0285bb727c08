"""The table of kinds: what is wrong with a job, or what shape a healthy one has, as code by place.

A line that ends in `# FAULT` is the one that the verdict should name. `pieces` are the fault: draw.py
puts them where job.py says `# <place>`, and leaves them out (or puts `fixed` there) in the same job
without its fault; `shape` is in both. A fault takes `LOSE` seconds every `EVERY` steps, or `TURNS`
turns of a Python loop, which take as long.
"""

# ruff: noqa: E501 - a table of code

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ANY = ("plain", "plain", "plain", "plain", "trainer", "lightning", "accelerate")
LOOPS = ("plain", "plain", "plain", "accelerate")
PLAIN = ("plain",)
NTH = (8, 12, 20, 30, 50)

INPUT, FORWARD, BACKWARD = ("input",), ("forward",), ("backward",)
OPTIMIZER, GRADIENTS = ("optimizer",), ("gradients",)
OUTSIDE = ("after_step", "between_steps", "prepare", "evaluation", "checkpoint")
PREPARE = ("prepare", "between_steps", "after_step", "input")
POSITIONS = {
    "item": INPUT, "collate": INPUT, "data_init": INPUT, "loader": INPUT, "batch": PREPARE,
    "forward": FORWARD, "after_forward": FORWARD, "before_update": (*GRADIENTS, *OPTIMIZER),
    "after_step": OUTSIDE, "training_step": ("prepare", "forward"),
}  # fmt: skip
"""Where in a step the code of a place runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault, or of healthy job."""

    name: str
    pieces: Mapping[str, str] = field(default_factory=dict)
    """The fault: code by place of job.py."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """What stands in places of the job without its fault; `pieces` are left out."""
    shape: Mapping[str, str] = field(default_factory=dict)
    """Code of both."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Constants of both."""
    at: tuple[str, ...] = ()
    """Positions of the true account; empty: those of the places that hold a `# FAULT`."""
    doing: tuple[str, ...] = ()
    """How its activity begins; empty: as the `# FAULT` says, or any."""
    said: tuple[str, ...] = ()
    """Where nothing of it stands in a step: findings, one of which must be among those said."""
    ranks: tuple[int, ...] = (1, 1, 2)
    """One of these is drawn."""
    styles: tuple[str, ...] = ANY
    families: tuple[str, ...] = ()
    """Empty: any."""
    workers: tuple[int, ...] = (0, 0, 1)
    magnitudes: tuple[float, float] = (0.045, 1.5)
    """Of a step, the least and the most that is drawn: 4 to 60 % of the whole."""
    every: tuple[int, ...] = (1,)
    """It is paid every so many steps: one of these is drawn."""
    rank: str = ""
    """`first` or `last`: the rank whose account it is."""
    seconds: float = 7.0
    options: tuple[str, ...] = ()
    """haiprof's own, where the job is recorded."""
    beside: str = ""
    """`neighbours`: four busy processes from the start; `late`: from the middle on."""
    under: str = ""
    """`one_core`; `quota`: half a core; `link`: ranks in a network of its own, whose rate takes
    `LOSE` a step. As `beside` they are a fault: without it the job has them not."""
    work: int = 1
    """Times over that its model works on a batch, besides what work.py finds: a step of this kind
    is so much shorter than a usual one, and its loader would have a tenth of it."""
    healthy: bool = False

    @property
    def positions(self) -> tuple[str, ...]:
        """Positions that its account may have; empty: any."""
        faulty = (place for place, code in self.pieces.items() if "# FAULT" in code)
        return self.at or tuple(
            dict.fromkeys(p for place in faulty for p in POSITIONS.get(place, ()))
        )

    @property
    def activities(self) -> tuple[str, ...]:
        """How the activity of its account may begin; empty: anyhow."""
        lines = re.findall(r".*# FAULT", "\n".join(self.pieces.values()))
        if self.doing or self.positions == INPUT or not lines:
            return self.doing  # in a worker the training thread waits whatever that does
        if all("sleep" in line for line in lines):
            return ("wait",)
        return ("python",) if all("for i in range(TURNS" in line for line in lines) else ()


BURN = "sum(i * i for i in range(TURNS))  # FAULT"
SLEEP = "time.sleep(LOSE)  # FAULT"
MORE = "more = max(int(len(x) * min(LOSE / STEP, 1.0)), 1)\nx, y = torch.cat((x, x[:more])), torch.cat((y, y[:more]))"
DEALT = MORE.replace("STEP, 1.0)), 1)", "STEP, 1.0)) // WORLD, 1)")
"""The same samples, as many for each rank."""
EACH_BURN = "sum(i * i for i in range(TURNS * max(WORKERS, 1) // BATCH))  # FAULT"
EACH_SLEEP = "if index % 8 == 0:\n    time.sleep(LOSE * max(WORKERS, 1) * 8 / BATCH)  # FAULT"
BEHIND_WORKERS = {"magnitudes": (1.1, 2.4), "styles": ANY}
"""Workers hide what is shorter than a step: of m steps, (m - 1) / m can be gained."""


def indented(code: str, by: int = 4) -> str:
    """The same lines further in."""
    return "\n".join(" " * by + line if line else line for line in code.split("\n"))


def when(condition: str, code: str) -> str:
    """Code under a condition."""
    return f"if {condition}:\n{indented(code)}"


def nth(code: str, who: str = "") -> dict[str, str]:
    """Code after every Nth step."""
    return {"after_step": when(f"step % EVERY == 0{who}", code)}


def thread(body: str) -> dict[str, str]:
    """A daemon thread that does the same again and again, from before training on."""
    code = f"import threading\n\ndef refresh() -> None:\n    while True:\n{indented(body, 8)}\n\nthreading.Thread(target=refresh, daemon=True).start()"
    return {"before_training": code}


def backwards(code: str) -> dict[str, str]:
    """Pieces of an autograd function that does something in its backward."""
    function = (
        "class Between(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x.view_as(x)\n\n    @staticmethod\n"
        f"    def backward(ctx, grad):\n{indented(code, 8)}\n        return grad\n"
    )
    return {"constants": function, "after_forward": "out = Between.apply(out)"}


def hooked(register: str, code: str, place: str = "model_init", gives: str = "") -> dict[str, str]:
    """Pieces of a hook."""
    end = f"\n    return {gives}" if gives else ""
    return {place: register, "constants": f"def slow_hook(*given):\n{indented(code)}{end}"}


def slow_optimizer(code: str) -> dict[str, str]:
    """Pieces of an optimizer that does something before each step."""
    start = "class Slow(torch.optim.AdamW):\n    def step(self, closure=None):\n"
    end = "\n        return super().step(closure)"
    return {"optimizer": "kind = Slow", "constants": start + indented(code, 8) + end}


ANSWER = "return out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"
EVALUATED = "evaluate(getattr(model, 'module', model), max(int(4 * LOSE / STEP), 1))  # FAULT"
SAVED = "torch.save({'model': model.state_dict(), 'more': torch.zeros(int(LOSE * 3e8))}, FOLDER / 'c.pt')  # FAULT"

FAULTS = (
    # the loader
    Kind(name="samples read from slow storage", pieces={"item": EACH_SLEEP}, workers=(0,)),
    Kind(name="slow storage behind workers", pieces={"item": EACH_SLEEP}, workers=(1, 2), **BEHIND_WORKERS),
    Kind(name="heavy transform without workers", pieces={"item": EACH_BURN}, workers=(0,)),
    Kind(name="too few workers", pieces={"item": EACH_BURN}, workers=(1,), ranks=(1,), **BEHIND_WORKERS),
    Kind(name="Python loops over a sample", workers=(0,), pieces={"item": "x = torch.stack([part * 1.0 for part in x.flatten()[: max(TURNS // (100 * BATCH), 2)]]).mean() + x  # FAULT"}),
    Kind(name="JSON parsed per sample", workers=(0,), shape={"data_init": "self.text = json.dumps(list(range(max(TURNS // BATCH // 2, 10))))"}, pieces={"item": "json.loads(self.text)  # FAULT"}),
    Kind(name="decompression per sample", workers=(0,), shape={"data_init": "import zlib\n\nself.packed = zlib.compress(bytes(range(256)) * (TURNS * 20 // BATCH // 256 + 1), 1)\nself.unpack = zlib.decompress"}, pieces={"item": "for _ in range(4):\n    self.unpack(self.packed)  # FAULT"}),
    Kind(name="retries of reads", workers=(0, 2), pieces={"item": "if index % 8 == 0:\n    for _ in range(3):\n        time.sleep(LOSE * max(WORKERS, 1) * 8 / BATCH / 3)  # FAULT"}, **BEHIND_WORKERS),
    Kind(name="file opened per sample", workers=(0,), shape={"data_init": "self.file = FOLDER / 'samples.bin'\nself.file.write_bytes(bytes(1 << 14))"}, pieces={"item": "for _ in range(max(int(LOSE * 8e4 / BATCH), 1)):\n    self.file.read_bytes()  # FAULT"}),
    Kind(name="few slow samples", pieces={"item": "if index % 512 == 7:\n    time.sleep(LOSE * 512 / BATCH)  # FAULT"}, workers=(0,)),
    Kind(name="slow collate", pieces={"collate": BURN}, workers=(0,)),
    Kind(name="slow collate in a worker", pieces={"collate": BURN}, workers=(1,), ranks=(1,), **BEHIND_WORKERS),
    Kind(name="collate that waits", pieces={"collate": SLEEP}, workers=(0,)),
    Kind(name="workers start each epoch", at=(*INPUT, *PREPARE), shape={"constants": "LENGTH = BATCH * 30"}, pieces={"constants": "PERSISTENT = False"}, workers=(1, 2), styles=PLAIN, ranks=(1,)),
    Kind(name="first batch", said=("first_batch",), pieces={"item": "if self.calls == 1 and index >= 0:\n    time.sleep(4.0)  # FAULT"}, workers=(0,), seconds=10),
    Kind(name="slow sampler", workers=(0,), styles=PLAIN, at=INPUT, shape={"constants": "class Slow(torch.utils.data.RandomSampler):\n    def __iter__(self):\n        for place, index in enumerate(super().__iter__()):\n            if place % BATCH == 0:\n                sum(i * i for i in range(TURNS))  # FAULT\n            yield index"}, pieces={"loader": "return DataLoader(data, batch_size=BATCH, sampler=Slow(data), drop_last=True, collate_fn=collate)"}),
    Kind(name="iterable dataset that waits", workers=(0,), styles=PLAIN, ranks=(1,), at=INPUT, pieces={"constants": "WAIT = LOSE"}, fixed={"constants": "WAIT = 0.0"}, shape={"constants": "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        data = Samples()\n        for index in range(LENGTH):\n            if index % 8 == 0 and WAIT:\n                time.sleep(WAIT * 8 / BATCH)  # FAULT\n            yield data[index]", "loader": "return DataLoader(Stream(), batch_size=BATCH, drop_last=True)"}),
    # forward
    Kind(name="wait in forward", pieces={"forward": SLEEP}),
    Kind(name="Python in forward", pieces={"forward": BURN}),
    Kind(name="small share of Python in forward", pieces={"forward": BURN}, magnitudes=(0.045, 0.2)),
    Kind(name="forward hook", at=FORWARD, pieces=hooked("self.inner.head.register_forward_hook(slow_hook)", BURN)),
    Kind(name="numpy in forward", pieces={"forward": "import numpy as np\n\nfor _ in range(max(TURNS // 3000, 1)):\n    np.sort(x.detach().numpy().reshape(-1)[:4096])  # FAULT"}),
    Kind(name="quantiles by numpy in forward", pieces={"forward": "import numpy as np\n\nx = x - float(np.quantile(x.detach().numpy().reshape(-1)[: int(LOSE * 3e7)], 0.5))  # FAULT"}),
    Kind(name="loop over elements in forward", pieces={"forward": "for value in x.detach().flatten()[: max(TURNS // 40, 4)]:  # FAULT\n    float(value)  # FAULT"}),
    Kind(name="samples one by one in forward", at=(*FORWARD, *BACKWARD), ranks=(1,), styles=LOOPS, families=("mlp", "transformer", "vit", "recommender", "graph"), pieces={"forward": "alone = max(int(len(x) * min(LOSE / STEP, 0.8) / 10), 1)\nout = torch.cat([*(self.inner(x[i : i + 1]) for i in range(alone)), self.inner(x[alone:])])  # FAULT\n" + ANSWER}),
    Kind(name="augmentation in forward", pieces={"forward": "[math_of(i) for i in range(TURNS // 2)]  # FAULT"}, shape={"constants": "def math_of(i):\n    return i * i % 7"}),
    Kind(name="printing in forward", pieces={"forward": "with (FOLDER / 'debug.txt').open('w') as file:\n    for i in range(max(TURNS // 6, 1)):\n        print(i, file=file)  # FAULT"}),
    Kind(name="augmentation in training_step", styles=("lightning",), ranks=(1,), pieces={"training_step": "import numpy as np\n\nnoise = np.convolve(x.numpy().reshape(-1)[: int(LOSE * 3e7)], np.ones(64), 'same')  # FAULT"}),
    Kind(name="Python in training_step", styles=("lightning",), ranks=(1,), pieces={"training_step": BURN}),
    # backward
    Kind(name="wait in backward", at=BACKWARD, pieces=backwards(SLEEP)),
    Kind(name="Python in backward", at=BACKWARD, pieces=backwards(BURN)),
    Kind(name="gradient hooks", at=BACKWARD, pieces=hooked("self.inner.head.weight.register_hook(slow_hook)", BURN, gives="given[0]")),
    Kind(name="full backward hook", at=BACKWARD, pieces=hooked("self.inner.head.register_full_backward_hook(slow_hook)", BURN)),
    Kind(name="hook behind accumulated gradients", at=BACKWARD, pieces=hooked("next(model.parameters()).register_post_accumulate_grad_hook(slow_hook)", BURN, "before_training")),
    Kind(name="recomputation", at=(*BACKWARD, *FORWARD), ranks=(1,), styles=PLAIN, pieces={"forward": "import torch.utils.checkpoint\n\nout = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # FAULT\n" + ANSWER}),
    Kind(name="slow link", at=BACKWARD, doing=("wait: link", "wait: socket", "link"), ranks=(2,), styles=PLAIN, under="link", families=("mlp", "transformer", "vit", "lstm", "recommender"), magnitudes=(0.2, 1.5)),
    # the optimizer
    Kind(name="optimizer in Python", at=OPTIMIZER, pieces=slow_optimizer(BURN)),
    Kind(name="optimizer that waits", at=OPTIMIZER, pieces=slow_optimizer(SLEEP)),
    Kind(name="hook behind the optimizer", at=(*OPTIMIZER, *OUTSIDE), pieces=hooked("optimizer.register_step_post_hook(slow_hook)", BURN, "before_training")),
    Kind(name="optimizer over a large dense embedding", at=(*OPTIMIZER, *BACKWARD), doing=("operators",), pieces={"model_init": "self.large = nn.Embedding(max(int(LOSE * 5e6), 100), 64)", "forward": "x = x + 0.0 * self.large.weight[self.calls % 100].mean()"}, families=("cnn", "lstm", "graph", "unet"), ranks=(1,)),
    # after the step
    Kind(name="wait between steps", pieces={"after_step": SLEEP}),
    Kind(name="metric in Python", pieces={"after_step": BURN}),
    Kind(name="small metric in Python", pieces={"after_step": BURN}, magnitudes=(0.045, 0.2)),
    Kind(name="edit distance", pieces={"after_step": "distance('a' * 60, 'b' * max(TURNS // 120, 1))  # FAULT"}, shape={"constants": "def distance(one, two):\n    row = list(range(len(one) + 1))\n    for j, b in enumerate(two):\n        before, row[0] = row[0], j + 1\n        for i, a in enumerate(one):\n            before, row[i + 1] = row[i + 1], min(row[i] + 1, row[i + 1] + 1, before + (a != b))  # FAULT\n    return row[-1]"}),
    Kind(name="gradient norms one by one", pieces={"before_update": "parts = [*model.parameters()]\nfor _ in range(max(TURNS // (450 * len(parts)), 1)):\n    for p in parts:\n        p.grad.norm().item()  # FAULT"}),
    Kind(name="clipping in Python", pieces={"before_update": BURN}),
    Kind(name="log file flushed each step", pieces={"after_step": "with (FOLDER / 'log.txt').open('a') as file:\n    for part in range(max(int(LOSE * 4000), 1)):\n        file.write(f'step {step} part {part}\\n')\n        file.flush()\n        os.fsync(file.fileno())  # FAULT"}),
    Kind(name="state copied each step", pieces={"after_step": "import copy\n\nfor _ in range(max(TURNS // 30_000, 1)):\n    copy.deepcopy(model.state_dict())  # FAULT"}, families=("mlp", "transformer", "vit")),
    Kind(name="average of weights by copies", pieces={"after_step": "import copy\n\nold = KEPT[0] if KEPT else model\nfor _ in range(max(int(LOSE * 600), 1)):\n    KEPT[:] = [copy.deepcopy(model)]  # FAULT\nwith torch.no_grad():\n    for p, q in zip(KEPT[0].parameters(), old.parameters(), strict=True):\n        p.lerp_(q, 0.99)"}, fixed={"after_step": "import copy\n\nif not KEPT:\n    KEPT[:] = [copy.deepcopy(model)]\nwith torch.no_grad():\n    for p, q in zip(KEPT[0].parameters(), model.parameters(), strict=True):\n        p.lerp_(q, 0.01)"}, families=("mlp", "transformer", "vit", "recommender"), ranks=(1,), styles=LOOPS),
    Kind(name="process started each step", pieces={"after_step": "import subprocess\n\nsubprocess.run(['sleep', str(LOSE)], check=False)  # FAULT"}),
    Kind(name="average of weights in Python", pieces={"after_step": "with torch.no_grad():\n    for p in model.parameters():\n        p.add_(0.0)\n" + BURN}),
    Kind(name="histograms of weights", pieces={"after_step": "import numpy as np\n\nfor p in model.parameters():\n    np.histogram(p.detach().numpy().reshape(-1)[: int(LOSE * 3e6)], 64)  # FAULT"}),
    Kind(name="replay list", pieces={"after_step": "DICE.shuffle(KEPT)  # FAULT"}, shape={"before_training": "KEPT.extend([i] for i in range(max(TURNS // 16, 100)))"}),
    Kind(name="batches made by hand", styles=PLAIN, constants={"LOADER": False}, pieces={"batch": BURN}),
    Kind(name="objects gathered each step", at=OUTSIDE, styles=PLAIN, ranks=(2,), pieces={"after_step": "for _ in range(max(int(LOSE * 500), 1)):\n    dist.all_gather_object([None] * WORLD, {'loss': 1.0})  # FAULT"}),
    # every Nth step
    Kind(name="checkpoints", pieces=nth(SAVED), every=NTH),
    Kind(name="checkpoints of rank 0", styles=PLAIN, ranks=(2,), rank="first", pieces=nth(SAVED, " and RANK == 0"), every=NTH),
    Kind(name="gzip saves", pieces=nth("import gzip\n\nwith gzip.open(FOLDER / 'state.gz', 'wb', 6) as file:\n    file.write(torch.randn(int(LOSE * 1e7)).numpy().tobytes())  # FAULT"), every=NTH),
    Kind(name="pictures", pieces=nth("import zlib\n\nimport numpy as np\n\npicture = (np.add.outer(np.arange(max(int(LOSE * 3e4), 8)), np.arange(512)) % 251).astype(np.uint8)  # FAULT\n(FOLDER / 'picture.z').write_bytes(zlib.compress(picture.tobytes(), 9))  # FAULT"), every=NTH),
    Kind(name="evaluation", styles=LOOPS, ranks=(1,), pieces=nth(EVALUATED), every=NTH),
    Kind(name="metric every Nth step", pieces=nth(BURN), every=NTH),
    Kind(name="wait every Nth step", pieces=nth(SLEEP), every=NTH),
    Kind(name="explicit collections", pieces={"after_step": "gc.collect()  # FAULT"}, shape={"constants": "import gc", "before_training": "gc.collect()\ngc.freeze()\nKEPT.extend([i] for i in range(int(LOSE * 1.5e7)))"}),
    Kind(name="collections now and then", pieces=nth("gc.collect()  # FAULT"), every=(8, 12), shape={"constants": "import gc", "before_training": "KEPT.extend([i] for i in range(int(LOSE * 1.5e7)))"}, magnitudes=(0.045, 0.6)),
    Kind(name="reference cycles", pieces={"after_step": "KEPT.append([Node() for _ in range(max(int(LOSE * 8e4), 20))])  # FAULT\ndel KEPT[:-100]"}, shape={"constants": "class Node:\n    def __init__(self):\n        self.me, self.load = self, [[] for _ in range(20)]  # FAULT"}),
    # over time
    Kind(name="drift in forward", pieces={"forward": "time.sleep(LOSE * min(self.calls / 300, 1.5))  # FAULT"}, seconds=9),
    Kind(name="drift in the loader", workers=(0,), pieces={"collate": "KEPT.append(1)\ntime.sleep(LOSE * min(len(KEPT) / 300, 1.5))  # FAULT"}, seconds=9),
    Kind(name="history written whole", pieces={"after_step": "KEPT.append(list(range(200)))\njson.dumps(KEPT[:: max(1, int(0.01 / LOSE))])  # FAULT"}, seconds=9),
    Kind(name="sudden regression", pieces={"forward": when("self.calls > 120", BURN)}, seconds=9),
    Kind(name="regression of the optimizer", at=OPTIMIZER, pieces=slow_optimizer("KEPT.append(1)\n" + when("len(KEPT) > 120", SLEEP)), seconds=9),
    Kind(name="memory creep", said=("memory_creep",), pieces={"after_step": "KEPT.append(torch.ones(int(LOSE * 4e7)))  # FAULT"}, magnitudes=(0.8, 1.5), seconds=12, ranks=(1,)),
    Kind(name="jitter in forward", pieces={"forward": when("DICE.random() < 0.05", "time.sleep(LOSE * 20)  # FAULT")}, seconds=9),
    Kind(name="recompiles", at=("compile", "forward", "backward"), styles=PLAIN, ranks=(1,), families=("transformer", "mlp", "recommender"), every=(10, 20, 40), constants={"LOADER": False}, seconds=10, shape={"batch": "count = BATCH - step // EVERY % 100\nx, y = x[:count], y[:count]"}, pieces={"model": "torch._dynamo.config.recompile_limit = 10_000\ntorch._dynamo.config.accumulated_recompile_limit = 10_000\nmodel.inner = torch.compile(model.inner, backend='eager', dynamic=False)", "forward": "out = self.inner(x)  # FAULT\n" + ANSWER}),
    # the machine
    Kind(name="busy neighbours", doing=("no core",), said=("busy_neighbours",), beside="neighbours", ranks=(1, 2), styles=PLAIN),
    Kind(name="neighbours come later", doing=("no core",), said=("busy_neighbours",), beside="late", ranks=(1,), styles=PLAIN, seconds=12),
    Kind(name="CPU quota", doing=("no core",), said=("cpu_throttled",), under="quota", ranks=(1,), styles=PLAIN, seconds=10),
    Kind(name="one core for training and a worker", doing=("no core", "wait: loader"), said=("too_few_cores", "shared_cores"), under="one_core", shape={"item": "sum(i * i for i in range(TURNS // BATCH))"}, workers=(1,), ranks=(1,), styles=PLAIN, magnitudes=(0.4, 0.9), seconds=10),
    Kind(name="two ranks on one core", doing=("no core",), said=("shared_cores",), under="one_core", ranks=(2,), styles=PLAIN),
    Kind(name="ranks pinned to one core", doing=("no core",), said=("shared_cores",), ranks=(2,), styles=PLAIN, pieces={"setup": "os.sched_setaffinity(0, {0})"}),
    Kind(name="too many threads", doing=("no core", "operators"), said=("shared_cores", "too_few_cores", "threads_over_cores"), pieces={"constants": "THREADS = 4"}, ranks=(2,), styles=PLAIN, families=("cnn", "unet", "transformer")),
    Kind(name="tiny operators", at=(*FORWARD, *BACKWARD), styles=PLAIN, ranks=(1,), options=("--explain",), pieces={"forward": "scale, row = self.inner.head.weight.mean() * 0 + 1, torch.ones(8)\nfor _ in range(max(int(LOSE * 7e4), 10)):\n    row = row * scale  # FAULT\nx = x + 0.0 * row.sum()"}),
    # ranks
    Kind(name="slow rank: loader", rank="last", ranks=(2,), styles=LOOPS, workers=(0,), pieces={"collate": when("LAST", SLEEP)}),
    Kind(name="slow rank: forward", rank="last", ranks=(2,), styles=LOOPS, pieces={"forward": when("LAST", BURN)}),
    Kind(name="slow rank: backward", at=BACKWARD, rank="last", ranks=(2,), styles=PLAIN, pieces=backwards(when("LAST", SLEEP))),
    Kind(name="slow rank: optimizer", at=OPTIMIZER, rank="last", ranks=(2,), styles=PLAIN, pieces=slow_optimizer(when("LAST", BURN))),
    Kind(name="rank 0 logs alone", rank="first", ranks=(2,), styles=LOOPS, pieces={"after_step": when("RANK == 0", SLEEP)}),
    Kind(name="rank 0 evaluates alone", rank="first", ranks=(2,), styles=PLAIN, pieces=nth(EVALUATED, " and RANK == 0"), every=NTH),
    Kind(name="rank 0 prepares and broadcasts", rank="first", ranks=(2,), styles=PLAIN, constants={"LOADER": False}, shape={"after_step": "dist.broadcast(torch.zeros(1000), 0)"}, pieces={"batch": when("RANK == 0", BURN)}),
    Kind(name="one rank has more data", at=(*FORWARD, *BACKWARD, *PREPARE), rank="last", ranks=(2,), styles=PLAIN, pieces={"batch": when("LAST", MORE)}, fixed={"batch": DEALT}),
    Kind(name="ranks' data uneven by turns", at=(*FORWARD, *BACKWARD, *PREPARE), ranks=(2,), styles=PLAIN, pieces={"batch": when("(step + RANK) % WORLD == 0", MORE)}, fixed={"batch": DEALT}),
    # other threads of Python: what the loop loses to them is not its own to count
    Kind(name="thread that loops in Python", doing=("wait: interpreter lock", "wait: gil"), said=("interpreter_lock",), styles=LOOPS, pieces=thread("sum(i * i for i in range(20_000))  # FAULT")),
    Kind(name="thread that polls in Python", doing=("wait: interpreter lock", "wait: gil"), said=("interpreter_lock",), styles=LOOPS, pieces=thread("sum(i * i for i in range(TURNS))  # FAULT\ntime.sleep(4 * STEP)"), magnitudes=(0.2, 3)),
    Kind(name="thread in long calls", doing=("wait: interpreter lock", "wait: gil"), said=("interpreter_lock",), styles=LOOPS, pieces=thread('import re\n\nre.match("(a|aa)+$", "a" * 27 + "!")  # FAULT\ntime.sleep(8 * STEP)')),
    # settings
    Kind(name="anomaly detection", at=(*FORWARD, *BACKWARD), pieces={"setup": "torch.autograd.set_detect_anomaly(True)"}, ranks=(1,), families=("transformer", "lstm", "graph"), styles=PLAIN),
    Kind(name="profiler left on", said=("profiler_left_on",), pieces={"before_training": "profiler = torch.profiler.profile(with_stack=True)\nprofiler.start()\nimport atexit\n\natexit.register(profiler.stop)  # torch 2.13 crashes at exit without"}, ranks=(1,), styles=PLAIN),
    Kind(name="float64", at=(*FORWARD, *BACKWARD, *OPTIMIZER), doing=("operators",), pieces={"setup": "torch.set_default_dtype(torch.float64)"}, ranks=(1,), styles=PLAIN, families=("mlp", "unet", "graph")),
    Kind(name="16 bits that the CPU lacks", at=(*FORWARD, *BACKWARD), ranks=(1,), styles=PLAIN, families=("mlp", "recommender", "cnn"), pieces={"constants": "HALF = torch.float16 if 'bf16' in Path('/proc/cpuinfo').read_text() else torch.bfloat16", "model_init": "inner = self.inner.last.forward\n\ndef half(x):\n    with torch.autocast('cpu', HALF):\n        return inner(x).float()  # FAULT\n\nself.inner.last.forward = half"}),
)  # fmt: skip

OWN = {"styles": PLAIN, "ranks": (1,)}


def loop(before: str, body: str) -> dict[str, str]:
    """A training loop of its own: what comes before it, and one step."""
    code = (
        f"loader = make_loader() if LOADER else None\n{before}\nfor x, y in batches(loader):\n{indented(body)}\n"
        "    step += 1\n    if over(step):\n        break"
    )
    return {"own": code, "constants": 'STYLE = "own"'}


UPDATE = "loss.backward()\noptimizer.step()\noptimizer.zero_grad()"
MODEL = "model = Net()\noptimizer = make_optimizer(model)\n"


def Healthy(**given: object) -> Kind:  # noqa: N802 - a row of the table
    """A kind with nothing wrong; its pieces can be left out to see what they take."""
    return Kind(healthy=True, **given)


HEALTHY = (
    Healthy(name="plain"),
    Healthy(name="all threads", constants={"THREADS": 0}, ranks=(1,)),
    Healthy(name="without loader", constants={"LOADER": False}, styles=PLAIN),
    Healthy(name="one worker", workers=(1,)),
    Healthy(name="two workers", workers=(2,), ranks=(1,)),
    Healthy(name="long epochs, workers not kept", workers=(1,), constants={"PERSISTENT": False}, styles=PLAIN, pieces={"constants": "LENGTH = BATCH * 4000"}),
    Healthy(name="accumulation", constants={"ACCUMULATE": 4}, styles=PLAIN),
    Healthy(name="logging", pieces={"after_step": "if step % 10 == 0 and RANK == 0:\n    print(f'step {step} loss {loss.item():.4f}', flush=True)"}),
    Healthy(name="saving", pieces={"after_step": "if step % 100 == 0 and RANK == 0:\n    torch.save(model.state_dict(), FOLDER / 'healthy.pt')"}),
    Healthy(name="evaluation", styles=LOOPS, pieces={"after_step": "if step % 50 == 0:\n    evaluate(model, 3)"}),
    Healthy(name="clipping and a schedule", styles=LOOPS, pieces={"before_update": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"}),
    Healthy(name="varying batches", styles=PLAIN, pieces={"batch": "count = max(1, int(len(x) * (1 - 0.3 * DICE.random())))\nx, y = x[:count], y[:count]"}, ranks=(1,)),
    Healthy(name="variable lengths", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "length = DICE.randint(x.shape[1] // 3, x.shape[1])\nx = x[:, :length]"}),
    Healthy(name="lengths in buckets", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "x = x[:, : x.shape[1] // DICE.choice((1, 2, 4))]"}),
    Healthy(name="packed sequences", styles=PLAIN, families=("transformer",), pieces={"batch": "rows = DICE.choice((1, 2, 4))\ncount = len(x) // rows\nx, y = x[: count * rows].reshape(count, -1)[:, : x.shape[1] * rows], y[:count]"}),
    Healthy(name="curriculum", work=2, styles=PLAIN, families=("transformer", "lstm"), ranks=(1,), pieces={"batch": "stage = min(3, 1 + step // 120)\nx = x[:, : x.shape[1] * stage // 3]"}),
    Healthy(name="alternating tasks", work=2, styles=PLAIN, pieces={"batch": "if step % 2:\n    x, y = x[: len(x) // 4], y[: len(y) // 4]"}),
    Healthy(name="one large step in five", work=2, styles=PLAIN, pieces={"batch": "if step % 5:\n    x, y = x[: len(x) // 3], y[: len(y) // 3]"}),
    Healthy(name="frozen backbone", work=3, ranks=(1,), pieces={"model_init": "for part in (self.inner.first, self.inner.last):\n    for p in part.parameters():\n        p.requires_grad_(False)"}),
    Healthy(name="frozen backbone without gradients", work=3, ranks=(1,), families=("mlp", "cnn"), pieces={"model_init": "for part in (self.inner.first, self.inner.last):\n    part.requires_grad_(False)", "forward": "with torch.no_grad():\n    x = self.inner.last(self.inner.first(x))\nout = self.inner.head(x)\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}),
    Healthy(name="half frozen", pieces={"model_init": "for p in self.inner.first.parameters():\n    p.requires_grad_(False)"}),
    Healthy(name="adapters", work=3, families=("mlp", "recommender", "unet"), ranks=(1,), pieces={"model_init": "for p in self.inner.parameters():\n    p.requires_grad_(False)\nself.adapter = nn.Linear(CLASSES, CLASSES)", "after_forward": "out = self.adapter(out)"}),
    Healthy(name="teacher", **OWN, pieces=loop(MODEL + "teacher = FAMILIES[FAMILY]().eval()", "with torch.no_grad():\n    goal = teacher(x)\nloss = F.mse_loss(model(x), goal)\n" + UPDATE)),
    Healthy(name="teacher inside", ranks=(1,), pieces={"model_init": "self.teacher = [FAMILIES[FAMILY]().eval()]", "after_forward": "with torch.no_grad():\n    goal = self.teacher[0](x)\nout = out + 0.0 * goal"}),
    Healthy(name="average of weights", **OWN, pieces=loop(MODEL + "average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)", "loss = F.cross_entropy(model(x), y)\n" + UPDATE + "\naverage.update_parameters(model)")),
    Healthy(name="momentum contrast", **OWN, pieces=loop(MODEL + "import copy\n\nkey = copy.deepcopy(model)", "with torch.no_grad():\n    for p, q in zip(key.parameters(), model.parameters(), strict=True):\n        p.lerp_(q, 0.01)\n    goal = key(x)\nloss = F.mse_loss(model(x), goal)\n" + UPDATE)),
    Healthy(name="PPO", **OWN, pieces=loop(MODEL, "with torch.no_grad():\n    for _ in range(16):\n        model(x[: max(len(x) // 8, 1)]).argmax(-1)\nfor part in range(4):\n    loss = F.cross_entropy(model(x[part::4]), y[part::4])\n" + indented(UPDATE))),
    Healthy(name="Q-learning with a target", **OWN, pieces=loop(MODEL + "target = Net()\ntarget.load_state_dict(model.state_dict())", "with torch.no_grad():\n    goal = target(x).amax(-1)\nloss = F.mse_loss(model(x).amax(-1), goal)\n" + UPDATE + "\nif step % 50 == 0:\n    target.load_state_dict(model.state_dict())")),
    Healthy(name="LBFGS", **OWN, families=("mlp", "recommender", "unet"), pieces=loop("model = Net()\noptimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)", "def closure():\n    optimizer.zero_grad()\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    return loss\n\noptimizer.step(closure)")),
    Healthy(name="GAN", **OWN, families=("mlp",), pieces=loop("make, judge = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)), Net()\nfirst = torch.optim.Adam(make.parameters(), lr=1e-4)\nsecond = torch.optim.Adam(judge.parameters(), lr=1e-4)", "fake = make(torch.randn(len(x), 64))\nsecond.zero_grad()\n(F.cross_entropy(judge(x), y) + F.cross_entropy(judge(fake.detach()), y)).backward()\nsecond.step()\nfirst.zero_grad()\nF.cross_entropy(judge(fake), y).backward()\nfirst.step()")),
    Healthy(name="GAN, five to one", **OWN, families=("mlp",), pieces=loop("make, judge = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)), Net()\nfirst = torch.optim.Adam(make.parameters(), lr=1e-4)\nsecond = torch.optim.Adam(judge.parameters(), lr=1e-4)", "second.zero_grad()\nfake = make(torch.randn(len(x), 64)).detach()\n(judge(fake).mean() - judge(x).mean()).backward()\nsecond.step()\nif step % 5 == 0:\n    first.zero_grad()\n    (-judge(make(torch.randn(len(x), 64))).mean()).backward()\n    first.step()")),
    Healthy(name="compiled", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='eager')"}),
    Healthy(name="compiled, warm-up of shapes", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='aot_eager', dynamic=False)", "batch": "if step % 40 == 39:\n    x, y = x[: len(x) // 2], y[: len(y) // 2]"}),
    Healthy(name="evaluation that compiles", styles=PLAIN, ranks=(1,), seconds=12, pieces={"model": "model.inner = torch.compile(model.inner, backend='aot_eager')\nevaluate(model, 2)", "after_step": "if step % 100 == 0:\n    evaluate(model, 3, BATCH // 2)"}),
    Healthy(name="tiny model", **OWN, pieces=loop("model = nn.Linear(x_width(), CLASSES)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)", "loss = F.cross_entropy(model(x.flatten(1)), y)\n" + UPDATE) | {"constants": 'STYLE = "own"\n\n\ndef x_width():\n    width = 1\n    for size in FAMILIES[FAMILY].shape:\n        width *= size\n    return width'}, workers=(0,), constants={"LOADER": False}),
    Healthy(name="bfloat16", styles=PLAIN, families=("mlp", "transformer", "recommender"), pieces={"forward": "with torch.autocast('cpu', torch.bfloat16):\n    out = self.inner(x).float()\nreturn out if labels is None else {'loss': F.cross_entropy(out, labels), 'logits': out}"}),
    Healthy(name="two optimizers", **OWN, pieces=loop("model = Net()\nfirst = torch.optim.AdamW(model.inner.head.parameters(), lr=1e-4)\nsecond = torch.optim.SGD([*model.inner.first.parameters(), *model.inner.last.parameters()], lr=1e-3)", "loss = F.cross_entropy(model(x), y)\nloss.backward()\nfirst.step()\nsecond.step()\nfirst.zero_grad()\nsecond.zero_grad()")),
    Healthy(name="sharpness-aware", **OWN, pieces=loop(MODEL, "F.cross_entropy(model(x), y).backward()\nwith torch.no_grad():\n    moved = [p.grad * 0.01 for p in model.parameters()]\n    torch._foreach_add_(list(model.parameters()), moved)\noptimizer.zero_grad()\nF.cross_entropy(model(x), y).backward()\nwith torch.no_grad():\n    torch._foreach_sub_(list(model.parameters()), moved)\noptimizer.step()\noptimizer.zero_grad()")),
    Healthy(name="gradient penalty", **OWN, families=("mlp", "unet", "cnn"), pieces=loop(MODEL, "x.requires_grad_()\nout = model(x)\n(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\nloss = F.cross_entropy(out, y) + slope.pow(2).mean()\n" + UPDATE)),
    Healthy(name="contrastive", **OWN, pieces=loop(MODEL, "one, two = F.normalize(model(x)), F.normalize(model(x + 0.1 * torch.randn_like(x)))\nloss = F.cross_entropy(one @ two.T, torch.arange(len(x)))\n" + UPDATE)),
    Healthy(name="truncated backpropagation", **OWN, families=("lstm",), pieces=loop(MODEL, "for part in x.chunk(4, 1):\n    loss = F.cross_entropy(model(part), y)\n" + indented(UPDATE))),
    Healthy(name="mixup", styles=PLAIN, pieces={"batch": "x = 0.7 * x + 0.3 * x.flip(0)"}),
    Healthy(name="dropout sampling", ranks=(1,), styles=PLAIN, pieces={"after_forward": "out = (out + self.inner(x)) / 2"}),
    Healthy(name="plain SGD", pieces={"optimizer": "kind = torch.optim.SGD"}),
    Healthy(name="collector frozen", pieces={"setup": "import gc\n\ngc.freeze()\ngc.disable()", "after_step": "if step % 50 == 0:\n    import gc\n\n    gc.collect(1)"}),
    Healthy(name="one collection", pieces={"before_training": "KEPT.extend([i] for i in range(4_000_000))", "after_step": "if step == 60:\n    import gc\n\n    gc.collect()"}),
    Healthy(name="saving in a thread", styles=PLAIN, pieces={"after_step": "if step % 100 == 0 and RANK == 0:\n    import copy\n    import threading\n\n    state = copy.deepcopy(model.state_dict())\n    threading.Thread(target=torch.save, args=(state, FOLDER / 't.pt')).start()"}),
    Healthy(name="short profile by the user", styles=PLAIN, ranks=(1,), pieces={"before_training": "KEPT.append(torch.profiler.profile())", "after_step": "if step == 30:\n    KEPT[0].start()\nif step == 33:\n    KEPT[0].stop()"}),
)  # fmt: skip
