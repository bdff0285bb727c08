"""Loops as they are read from the source: whether a round needs what an earlier one left."""

from __future__ import annotations

import pytest

from haiprof.in_job.loops import find_loop
from haiprof.run_format.stack_lines import INDEPENDENT, LAYERS, NO_GRAD, OPERATIONS_BIT, RECURRENCE

INDEPENDENT_LOOPS = (
    """
for b in range(q.shape[0]):
    hs = []
    for i in range(self.h):
        w = (q[b, i] @ k[b, i].T).softmax(-1); hs.append(w @ v[b, i])
    out.append(torch.stack(hs))
""",
    "for k in range(n):\n    total = total + (1 - i / (a[k].abs() + 1))\n",
    "for i, row in enumerate(x):\n    j += 1\n    out[j] = row.sum()\n",
    "for i in x:\n    out = torch.cat([out, f(i)])\n",
    "for i in range(n):\n    out[i] = out[i] * 2\n",
    "for i in range(len(x)):\n    x[i, :, a : a + 8] = 0\n    x[i] = x[i].flip(-1)\n",
    "for p in parameters:\n    p.grad.mul_(scale)\n",
    "for i in r:\n    for j in r:\n        loss += (e[i] - e[j]).norm() * m[i, j]\n",
    "for i in r:\n    y = x[i].clone()\n    y[0] = 1\n    out.append(y.sum())\n",
    "for j in range(k):\n    self.sum[j] = 0.99 * self.sum[j] + z[idx == j].sum(0)\n",
    "for i in range(len(z)):\n    if mask[i].any():\n        losses.append(d[i][mask[i]].max())\n",
    "while i < n:\n    out.append(x[i].sum())\n    i += 1\n",
)
RECURRENCES = (
    "for t in range(T):\n    h = torch.tanh(x[:, t] @ W + h @ U)\n    out.append(h)\n",
    "for t in range(n):\n    hs.append(cell(hs[-1]))\n",
    "for i in range(1, n):\n    out[i] = out[i - 1] * a + x[i]\n",
    "for t in r:\n    self.h = f(x[t], self.h)\n    out.append(self.h)\n",
    "for i in r:\n    y = g(before)\n    before = y\n",
    "for t in r:\n    acc += x[t]\n    out.append(acc)\n",
    "for t in r:\n    h[0] = f(h[0], x[t])\n",
    "for i in r:\n    x = f(x[0])\n",
    "for w, b in zip(ws, bs):\n    x = x @ w + b\n",
    "for b in loader:\n    loss = f(b)\n    loss.backward()\n    opt.step()\n",
    "for t in r:\n    a = policy(obs)\n    obs, reward = env.step(a)\n",
    "while err > tol:\n    u = a / (K @ v)\n    v = b / (K.T @ u)\n",
)
OVER_LAYERS = (
    "for e in self.experts:\n    hs.append(e(h).relu())\n",
    "for i in range(n):\n    y += self.heads[i](x)\n",
)
OTHERS = (
    "for layer in layers:\n    x = layer(x)\n",
    "for i in range(n):\n    x = self.layers[i](x)\n",
    "for i in range(2):\n    out.append(f(x, i))\n",
    "for q in (a, b, c):\n    out.append(q.sum())\n",
    "for i in r:\n    if x[i] > 3:\n        break\n    y.append(x[i].sum())\n",
    "for i in r:\n    yield x[i].sum()\n",
)


def loop_of(text: str, word: str = "") -> tuple[int, int]:
    """The loop of the last line, or of the line with a word."""
    source = text.encode().splitlines(keepends=True)
    line = next((n for n, each in enumerate(source, 1) if word and word.encode() in each), None)
    line = line or len(source)
    at, kind = find_loop(source, line, len(source[line - 1]), 1, "f", {})
    return at, kind % (1 << OPERATIONS_BIT)


@pytest.mark.parametrize("text", INDEPENDENT_LOOPS)
def test_rounds_that_do_not_need_one_another(text: str) -> None:
    assert loop_of(text)[1] == INDEPENDENT


@pytest.mark.parametrize("text", RECURRENCES)
def test_rounds_that_need_an_earlier_one(text: str) -> None:
    assert loop_of(text)[1] == RECURRENCE


@pytest.mark.parametrize("text", OVER_LAYERS)
def test_layers_that_do_not_need_one_another(text: str) -> None:
    assert loop_of(text)[1] == LAYERS


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[head(x) for head in heads]", LAYERS), ("[row.sum() for row in x]", INDEPENDENT)],
)
def test_comprehensions_that_call_a_layer_in_each_round(text: str, kind: int) -> None:
    found = find_loop([text.encode()], 1, text.index(" for"), 1, "f.<listcomp>", {})
    assert found[1] & LAYERS == kind


@pytest.mark.parametrize("text", OTHERS)
def test_loops_over_layers_of_few_rounds_and_with_an_early_end_are_nothing(text: str) -> None:
    assert loop_of(text) == (0, 0)


def test_a_loop_inside_a_training_loop_is_found() -> None:
    text = """\
def train(model, loader):
    for x in loader:
        y = model(x)
        loss = 0
        for k in range(len(y)):
            loss = loss + y[k].square().sum()

        loss.backward()
    return model
"""
    assert loop_of(text, "square") == (5, INDEPENDENT)
    assert loop_of(text, "backward") == (2, RECURRENCE)
    assert loop_of(text, "return") == (0, 0)


def test_no_gradients_are_recorded_below_no_grad() -> None:
    text = """\
with torch.no_grad():
    for k in range(n):
        code[k] = z[k].mean(0)
"""
    assert loop_of(text) == (2, INDEPENDENT | NO_GRAD)
    assert loop_of("def forward(self, x):\n    with torch.no_grad():\n        i = near(x)\n") == (
        0, NO_GRAD,
    ), "nor in what is called there"  # fmt: skip
    assert loop_of("with torch.no_grad():\n    i = near(x)\ny = i + 1\n") == (0, 0)


def test_numbers_of_python_have_no_gradient() -> None:
    text = """\
for k in range(length):
    for i in range(0, d, 2):
        table[k, i] = math.sin(k / 10000 ** (i / d))
"""
    assert loop_of(text) == (1, INDEPENDENT | NO_GRAD)


GRADLESS = (
    "for row, t in zip(out, y):\n    if row.argmax().item() == t.item():\n        good += 1\n",
    "for k in r:\n    p = logits[k].softmax(0)\n    best = p.argmax()\n    out.append(int(best))\n",
    "for k in range(n):\n    hits += (pred[k] > 0.5) == y[k]\n",
    "for name, p in net.named_parameters():\n    f.write(f'{name} {p.mean().item()}')\n",
    """\
def positions(t, d):
    pos = torch.arange(t).float()[:, None]
    freq = torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
    table = torch.zeros(t, d)
    for i in range(t):
        table[i, 0::2] = torch.sin(pos[i] * freq)
""",
)
GRADED = (
    "for k in range(n):\n    loss += (p[k] - t[k]).abs()\n",
    "for k in range(n):\n    loss = loss + (p[k] > t[k]) * p[k]\n",
    "for k in range(n):\n    out.append(x[k].sum())\n",
    "for k in range(n):\n    out[k] = w[k] * torch.sin(pos[k])\n",
    "w = torch.zeros(3, requires_grad=True)\nfor k in range(n):\n    out[k] = w[k] * 2\n",
    "x = torch.zeros(3)\nx = net(x)\nfor k in range(n):\n    out[k] = x[k] * 2\n",
    "for k in range(n):\n    keep(x[k])\n",
    "x = torch.zeros(3)\nx = net(\n    y)\nfor k in range(n):\n    out[k] = x[k] * 2\n",
    "x = torch.zeros(3)\nx, c = net(y)\nfor k in range(n):\n    out[k] = x[k] * 2\n",
    "x = torch.zeros(3)\nx += net(y)\nfor k in range(n):\n    out[k] = x[k] * 2\n",
    "x = torch.zeros(3)\nx[1] = net(y)\nfor k in range(n):\n    out[k] = x[k] * 2\n",
    "x = torch.zeros(3)\nx.copy_(net(y))\nfor k in range(n):\n    out[k] = x[k] * 2\n",
)


@pytest.mark.parametrize("text", GRADLESS)
def test_what_no_gradient_comes_out_of_has_no_part_of_backward(text: str) -> None:
    assert loop_of(text)[1] & NO_GRAD


@pytest.mark.parametrize("text", GRADED)
def test_what_a_loss_may_need_is_not_taken_to_be_without_gradients(text: str) -> None:
    assert not loop_of(text)[1] & NO_GRAD


def test_operations_of_a_round_are_counted() -> None:
    source = [b"for k in range(n):\n", b"    total = total + (p[k] - t[k]).abs()\n"]
    _, kind = find_loop(source, 2, len(source[1]), 1, "f", {})
    assert kind >> OPERATIONS_BIT == 6  # range, +, two items, -, abs


def test_a_comprehension_is_a_loop() -> None:
    source = [b"hs = [x[i].norm() for i in range(n)]\n"]
    for function in ("forward.<locals>.<listcomp>", "forward"):
        line, kind = find_loop(source, 1, 17, 1, function, {})
        assert (line, kind & INDEPENDENT) == (1, INDEPENDENT)
    assert find_loop(source, 1, len(source[0]), 1, "forward", {}) == (0, 0)


def test_a_comment_and_the_items_of_a_loop_are_no_comprehension_around_it() -> None:
    source = [b"y = f(x)  # once for all rows in x\n"]
    assert find_loop(source, 1, 8, 1, "forward", {}) == (0, 0)
    source = [b"for x in (g(b) for b in loader):\n", b"    loss.backward()\n"]
    known: dict[int, int] = {}
    assert find_loop(source, 1, 14, 1, "main.<locals>.<genexpr>", known)[1] & INDEPENDENT
    assert find_loop(source, 2, 19, 1, "main", known)[1] & RECURRENCE


def test_what_cannot_be_read_is_no_loop() -> None:
    long = "for i in r:\n" + "    y.append(x[i])\n" * 200
    assert loop_of(long) == (0, 0)
    assert loop_of("for i in r:\n    y.append(x[i]\n    z = (\n") == (0, 0)
    assert loop_of("for i in r:\n    y.append(x[i]" + " + x[i]" * 20_000 + ")\n") == (0, 0)
    assert loop_of("for i in r:\n    y.append(" + "(" * 500 + "x[i]" + ")" * 501 + "\n") == (0, 0)
