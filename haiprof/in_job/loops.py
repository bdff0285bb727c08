"""Loops of the job's code: whether a round needs an earlier one, or batched operators could do all.

A loop is read from the source, once, where a sample was inside it; no code of the job runs.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Sequence

from haiprof.run_format.stack_lines import INDEPENDENT, LAYERS, NO_GRAD, OPERATIONS_BIT, RECURRENCE

_LINE_LIMIT = 100  # a longer loop is a training loop, or is not taken for one that may be batched
_LIMIT_BYTES = 4096
_FEW = 3  # rounds that a loop is known to have, up to which little is gained by doing them at once
_HEADS = (b"for ", b"while ", b"async for ")
_FOR = re.compile(rb"[^#]*\sfor\s[^#]+\sin\s")
"""Follows what a comprehension works out, on its line."""
_ITEMS = re.compile(rb"\bfor\s+([^#]+?)\s+in\s")
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
_ADDS = frozenset({"append", "extend", "add", "insert", "update"})
_JOINS = frozenset({"cat", "concat", "stack", "maximum", "minimum", "max", "min", "logaddexp"})
"""`x = torch.cat([x, y])` adds to x, as `x = x + y` does."""
_LEAVES = frozenset({
    "item", "tolist", "numpy", "detach", "argmax", "argmin", "argsort", "size", "dim", "numel",
    "len", "int", "float", "bool", "str", "range", "isinstance", "data", "shape",
    "ndim", "dtype", "device", "grad",
})  # fmt: skip
"""What has no gradient, whatever it is called or taken of."""
_MAKES = frozenset({
    "arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "linspace",
    "logspace", "eye", "tensor",
})  # fmt: skip
_LIBRARIES = frozenset({"torch", "math", "np", "numpy", "random"})
_OF_NUMBERS = frozenset({"min", "max", "abs", "sum", "round", "zip", "sorted"})
_SAYS = _ADDS | {"write", "print", "writerow", "add_scalar"}
_CHANGES = re.compile(rb"\s*([\w, ]+)(?:\[.*\]|\.\w+_\(.*|\s*[-+*/@%&|^]?=[^=])")
"""A line that gives names a value, changes what they have or an item of it."""
_MADE_LINES = 100  # so many lines before a loop are looked at for what makes its tensors
_OPERATIONS = (ast.Call, ast.BinOp, ast.AugAssign, ast.Compare, ast.UnaryOp, ast.Subscript)
_ENDS = (ast.Return, ast.Break, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith,
         ast.Global, ast.Nonlocal)  # fmt: skip


def find_loop(
    source: Sequence[bytes], line: int, end: int, first: int, function: str, known: dict[int, int]
) -> tuple[int, int]:
    """The line of the loop around some code, in its function, and what that is.

    It is the outermost one whose rounds do not need one another; where none is, the innermost.
    Line 0 where there is no loop, and for a loop over layers each of which needs the one before:
    what it is then says whether gradients are recorded. The code is on a `line` of the `source`,
    from 1 on, and ends at the byte `end` of it; `first` is the first line of its function. To
    `known`, kinds of loops of the file by line, it is added.
    """
    text = source[line - 1]
    around = list[tuple[int, int]]()  # the innermost first
    if function.endswith(_COMPREHENSIONS) or _FOR.match(text, end):  # from CPython 3.12 on
        count = text.count(b"(") + text.count(b"[")
        items = {each for names in _ITEMS.findall(text) for each in re.findall(rb"\w+", names)}
        over_layers = items.intersection(re.findall(rb"\b(\w+)\(", text))
        around.append((line, (LAYERS if over_layers else INDEPENDENT) | count << OPERATIONS_BIT))
    least, no_grad = _indent(text), 0
    if text.lstrip().startswith(_HEADS) and text[:end].rstrip()[-1:] != b":":
        least += 1  # the next round, or the loop's body on the same line
    for at in range(line, max(first, 1) - 1, -1):
        text = source[at - 1]
        indent = _indent(text)
        if not text.strip() or indent >= least:
            continue
        least, head = indent, text.lstrip()
        if head.startswith(_HEADS):
            if at not in known:
                loop = _loop_text(source, at)
                made = _find_made(source[max(first, at - _MADE_LINES) : at - 1], loop)
                known[at] = _kind_of(loop, made)
            around.append((at, known[at]))
        elif head.startswith(b"with ") and (b"no_grad" in head or b"inference_mode" in head):
            no_grad = NO_GRAD
    free = [each for each in around if each[1] & LAYERS == INDEPENDENT]
    found, kind = free[-1] if free else next((each for each in around if each[1]), (0, 0))
    return (found, kind | no_grad) if found else (0, no_grad)


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def _loop_text(source: Sequence[bytes], line: int) -> bytes:
    """The loop that begins at a line, as if nothing were around it; empty where it is long."""
    indent = _indent(source[line - 1])
    lines = [source[line - 1][indent:]]
    for text in source[line:]:
        if text.strip() and _indent(text) <= indent and not text.lstrip().startswith(b")"):
            break
        if len(lines) == _LINE_LIMIT:
            return b""
        lines.append(text[indent:] if text.strip() else b"\n")
    whole = b"".join(each if each.endswith(b"\n") else each + b"\n" for each in lines)
    return whole if len(whole) <= _LIMIT_BYTES else b""


def _find_made(lines: Sequence[bytes], loop: bytes) -> set[str]:
    """Names of a loop that lines before it give no gradients: `pos = torch.arange(n)`."""
    # What such a tensor is made of is a number: n.
    found, used = set[str](), set(re.findall(rb"\w+", loop))
    for line in lines:
        named = _CHANGES.match(line)
        changed = set(re.findall(rb"\w+", named[1])) & used if named else set()
        if not changed:
            continue
        found -= {name.decode() for name in changed}
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            (node,) = ast.parse(line.strip()).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                calls = (call for call in ast.walk(node.value) if isinstance(call, ast.Call))
                made = [call for call in calls if _call_name(call) in _MAKES]
                found |= {n.id for call in made for n in call.args if isinstance(n, ast.Name)}
                if _has_no_graph(node.value, found):
                    found.add(node.targets[0].id)
    return found


def _call_name(call: ast.Call) -> str:
    """The name of what is called, without its owner."""
    named = call.func
    return named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")


def _has_no_graph(node: ast.AST, free: set[str]) -> bool:
    """Whether a value has no gradient, where some names have none."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare):
        return True
    if isinstance(node, ast.Name):
        return node.id in free or node.id in _LIBRARIES
    if isinstance(node, ast.Attribute):
        return node.attr in _LEAVES or _has_no_graph(node.value, free)
    if isinstance(node, ast.Subscript):
        return _has_no_graph(node.value, free)
    if isinstance(node, ast.Call):
        name = _call_name(node)
        if name in _LEAVES or _text(node.func).startswith("math."):
            return True
        if any(each.arg == "requires_grad" for each in node.keywords):
            return False
        is_known = name in _MAKES or name in _OF_NUMBERS
        if isinstance(node.func, ast.Attribute):
            is_known = _has_no_graph(node.func.value, free)
        given = () if name in _MAKES else (*node.args, *(each.value for each in node.keywords))
        return is_known and all(_has_no_graph(each, free) for each in given)
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp | ast.Tuple | ast.List):
        parts = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
        return all(_has_no_graph(each, free) for each in parts)
    return False


def _leaves_no_graph(body: Sequence[ast.stmt], free: set[str], *, rounds: int) -> bool:
    """Whether no tensor with gradients comes out of some statements: backward passes them by."""
    # Names that they give a value are added to `free`, if it has none. `rounds` says whether those
    # of a loop need one another.
    for node in body:
        if isinstance(node, ast.For):
            items, target = node.iter, node.target
            if isinstance(items, ast.Call) and _call_name(items) == "enumerate" and items.args:
                if isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
                    free.add(target.elts[0].id)
                items = items.args[0]
            if _has_no_graph(items, free):
                free |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            is_free = _leaves_no_graph([*node.body, *node.orelse], free, rounds=rounds)
        elif isinstance(node, ast.If | ast.While):
            is_free = _leaves_no_graph([*node.body, *node.orelse], free, rounds=rounds)
        elif isinstance(node, ast.Assign):
            is_free = _has_no_graph(node.value, free)
            target = node.targets[0]
            if isinstance(target, ast.Name) and is_free:
                free.add(target.id)
            elif isinstance(target, ast.Name) and rounds == INDEPENDENT:  # used in its round alone
                free.discard(target.id)
                names = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
                is_free = target.id not in names
        elif isinstance(node, ast.AugAssign):
            is_free = _has_no_graph(node.value, free)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = (*node.value.args, *(each.value for each in node.value.keywords))
            is_free = _call_name(node.value) in _SAYS and all(_has_no_graph(x, free) for x in given)
        else:
            is_free = isinstance(node, ast.Pass | ast.Continue | ast.Assert)
        if not is_free:
            return False
    return True


def _kind_of(text: bytes, made: set[str]) -> int:
    """What a loop is; 0 where that is not known, of few rounds, and of layers in a row."""
    # `made` are names without gradients.
    try:
        (loop,) = ast.parse(text).body
        if not isinstance(loop, ast.For | ast.While) or any(
            isinstance(node, _ENDS) for node in ast.walk(loop)
        ):
            return 0
        if isinstance(loop, ast.For) and _is_short(loop.iter):
            return 0
        rounds = _Rounds()
        rounds.visit_rounds(loop)
        kind = INDEPENDENT if rounds.is_independent() else RECURRENCE
        if isinstance(loop, ast.For) and _is_over_layers(loop):
            if kind == RECURRENCE:
                return 0
            kind = LAYERS
        count = sum(isinstance(node, _OPERATIONS) for node in ast.walk(loop))
        free = _leaves_no_graph([loop], set(made), rounds=kind)
        return kind | (NO_GRAD if free else 0) | count << OPERATIONS_BIT
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0


def _is_over_layers(loop: ast.For) -> bool:
    """Whether another thing is called in each round: `x = layer(x)`, `x = self.layers[k](x)`."""
    items = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    called = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(
        isinstance(each, ast.Subscript) or (isinstance(each, ast.Name) and each.id in items)
        for each in called
    )


def _is_short(items: ast.expr) -> bool:
    """Whether a loop has few rounds by what it says: `range(2)`, `(q, k, v)`."""
    if isinstance(items, ast.Tuple | ast.List):
        return len(items.elts) <= _FEW
    return (
        isinstance(items, ast.Call) and isinstance(items.func, ast.Name)
        and items.func.id == "range" and len(items.args) == 1
        and isinstance(items.args[0], ast.Constant) and isinstance(items.args[0].value, int)
        and items.args[0].value <= _FEW
    )  # fmt: skip


class _Rounds(ast.NodeVisitor):
    """What one round reads and writes, in the order in which it does."""

    def __init__(self) -> None:
        self._first: dict[str, bool] = {}
        """By name or attribute: whether a round begins by writing it, and not by reading it."""
        self._reads: Counter[str] = Counter()
        self._written: set[str] = set()
        self._added: set[str] = set()  # to which is added: a sum, a list
        self._counted: set[str] = set()  # counters: `i += 1`
        self._items: dict[str, set[str]] = {}  # by what has items: those that are written
        self._item_reads: dict[str, set[str]] = {}
        self._acts = False  # whether it calls something for its effect: backward, a step, a method

    def is_independent(self) -> bool:
        """Whether a round reads nothing that another one wrote."""
        needed = self._written | {
            name for name in self._added if self._reads[name] or name in self._item_reads
        } | {
            name for name, written in self._items.items()
            if self._reads[name] or self._item_reads.get(name, set()) - self._own_items(written)
        }  # fmt: skip
        earlier = {name for name in needed if not self._first[name]}
        return not (self._acts or earlier - self._counted)

    def _own_items(self, items: set[str]) -> set[str]:
        """Of items, those that are another one in each round."""
        varies = self._written | self._counted
        return {each for each in items if varies.intersection(re.findall(r"\w+", each))}

    def visit_rounds(self, loop: ast.For | ast.While) -> None:
        """Visits what each round of a loop does: what a `for` goes over is worked out once."""
        self._visit_all([loop.target if isinstance(loop, ast.For) else loop.test])
        self._visit_all(loop.body + loop.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        self._visit_all(node.body + node.orelse)

    def visit_Assign(self, node: ast.Assign) -> None:
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        rest = _others_of(name, node.value) if name and len(node.targets) == 1 else None
        if rest is not None:
            self._visit_all(rest)
            self._change(name, self._added)
            return
        self.visit(node.value)
        self._visit_all(node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Subscript):
            self.visit(node.target)
            return
        is_count = isinstance(node.value, ast.Constant)
        self._change(_text(node.target), self._counted if is_count else self._added)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Constant):
            return
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and (call.func.attr in _ADDS or call.func.attr.endswith("_"))
        ):
            self._add_to(call.func.value)
            self._visit_all([*call.args, *(each.value for each in call.keywords)])
            return
        self._acts |= not isinstance(call, ast.ListComp | ast.Name | ast.Attribute)
        self.visit(call)

    def _add_to(self, changed: ast.expr) -> None:
        """`out.append(x)`, `out[k].add_(x)`."""
        if isinstance(changed, ast.Subscript):
            self._note_item(changed, self._items)
        elif isinstance(changed, ast.Name | ast.Attribute):
            self._change(_text(changed), self._added)
        else:
            self.visit(changed)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node.id, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(_text(node), node.ctx)
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        is_written = isinstance(node.ctx, ast.Store)
        self._note_item(node, self._items if is_written else self._item_reads)

    def _note_item(self, item: ast.Subscript, known: dict[str, set[str]]) -> None:
        """`x[k]` reads or changes an item of what `x` was before."""
        name = _text(item.value)
        self._first.setdefault(name, False)
        known.setdefault(name, set()).add(_text(item.slice))
        self.visit(item.slice)
        owner = item.value.value if isinstance(item.value, ast.Attribute) else item.value
        if not isinstance(owner, ast.Name):
            self.visit(owner)

    def _change(self, name: str, known: set[str]) -> None:
        self._first.setdefault(name, False)
        known.add(name)

    def _note(self, name: str, context: ast.expr_context) -> None:
        is_written = isinstance(context, ast.Store)
        self._first.setdefault(name, is_written)
        if is_written:
            self._written.add(name)
        else:
            self._reads[name] += 1

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _text(node: ast.expr) -> str:
    """An expression as text: the same for the same one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_text(node.value)}.{node.attr}"
    return ast.unparse(node)


def _others_of(name: str, value: ast.expr) -> list[ast.expr] | None:
    """What is added to a name by `x = x + a + b` or `x = torch.cat([x, y])`; None: it is not."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Mult):
        left: ast.expr = value
        found = []
        while isinstance(left, ast.BinOp) and type(left.op) is type(value.op):
            found.append(left.right)
            left = left.left
        found.append(left)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in _JOINS:
            return None
        found = [
            item for each in value.args
            for item in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])
        ]  # fmt: skip
    else:
        return None
    others = [each for each in found if not (isinstance(each, ast.Name) and each.id == name)]
    return others if len(others) == len(found) - 1 else None
