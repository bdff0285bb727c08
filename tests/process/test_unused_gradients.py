"""Gradients that no optimizer uses are counted; those that anything uses or clears are not."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from haiprof.in_job import object_settings
from haiprof.in_job.object_settings import CallHooks, UnusedGradients
from haiprof.run_format.setting_lines import DISCARDED_FIELDS, HOOK_FIELDS, UNUSED_FIELDS

Step = Callable[[], None]
Job = tuple[list[nn.Module], list[torch.optim.Optimizer], Step]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_settings, "_GRADIENT_PAUSES_NS", (0, 0))


def models() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 4)


def one_each(*roots: nn.Module, **options: bool) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(each.parameters(), lr=0.1, **options) for each in roots]


def distill(
    clear: Callable[[nn.Module, nn.Module, torch.optim.Optimizer], None] | None = None,
    after: Callable[[nn.Module, nn.Module], None] | None = None,
    passes: int = 1,
) -> Job:
    """A student that an optimizer steps, and a teacher that requires gradients."""
    student, teacher = models()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step() -> None:
        if clear is None:
            optimizer.zero_grad()
        else:
            clear(student, teacher, optimizer)
        for _ in range(passes):
            x = torch.ones(2, 4)
            (student(x) - teacher(x)).square().mean().backward()
        if after is not None:
            after(student, teacher)
        optimizer.step()

    return [student, teacher], [optimizer], step


def zeros(student: nn.Module, teacher: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def both(*, set_to_none: bool) -> Callable[[nn.Module, nn.Module, torch.optim.Optimizer], None]:
    def clear(student: nn.Module, teacher: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        student.zero_grad(set_to_none=set_to_none)
        teacher.zero_grad(set_to_none=set_to_none)

    return clear


def by_hand(kept: bool = False, to_none: bool = False) -> Job:
    """What no optimizer steps is changed by the job itself."""

    def clear(student: nn.Module, teacher: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for parameter in teacher.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
                if not kept:
                    parameter.grad.zero_()
                parameter.grad = None if to_none else parameter.grad

    return distill(clear, after=None if kept or to_none else clips)


def clips(student: nn.Module, teacher: nn.Module) -> None:
    nn.utils.clip_grad_norm_([*student.parameters(), *teacher.parameters()], 1.0)


def asked_at_first() -> Job:
    """The teacher's gradients are of the first steps, and nobody cleared them."""
    roots, optimizers, step = distill()
    student, teacher = roots
    steps = itertools.count()

    def then_alone() -> None:
        if next(steps) < 2:
            return step()
        optimizers[0].zero_grad()
        student(torch.ones(2, 4)).square().mean().backward()
        return optimizers[0].step()

    return [student, teacher], optimizers, then_alone


def frozen() -> Job:
    job = distill()
    job[0][1].requires_grad_(False)
    return job


def taking_turns() -> Job:
    """Two optimizers, of which each backward makes gradients for both, as of a GAN."""
    first, second = models()
    optimizers = one_each(first, second)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
            second(first(torch.ones(2, 4))).square().mean().backward()
            optimizer.step()

    return [first, second], optimizers, step


def graphs(roots: list[nn.Module]) -> list[torch.Tensor]:
    """What a backward begins at in which the second model follows the first one's inputs."""
    return [sum(root(torch.ones(2, 4)).sum() for root in roots)]


def look_at(
    roots: list[nn.Module], optimizers: list[torch.optim.Optimizer], lines: list[dict[str, Any]]
) -> UnusedGradients:
    return UnusedGradients(
        lambda: list(enumerate(roots, 1)), lambda: list(enumerate(optimizers, 1)), lines
    )


def counted(job: Job, steps: int = 5) -> list[dict[str, Any]]:
    """What the second look finds, by root."""
    roots, optimizers, step = job
    lines: list[dict[str, Any]] = []
    gradients = look_at(roots, optimizers, lines)
    for number in range(11, 11 + 2 * steps):
        step()
        if number % steps == 0 and gradients.is_due(number):
            gradients.look(number, optimizers[-1])
            if gradients.wants_graph:
                gradients.walk(graphs(roots))
    assert not any(line["type"] == "settings_failed" for line in lines)
    return lines[-1]["roots"] if lines else []


@pytest.mark.parametrize(
    "job",
    [
        distill(), distill(zeros), distill(after=clips), distill(passes=3),
        distill(zeros, after=clips, passes=2), distill(both(set_to_none=False)),
        distill(both(set_to_none=True)),
    ],
)  # fmt: skip
def test_gradients_of_what_nothing_changes_are_counted(job: Job) -> None:
    student, teacher = counted(job)
    assert student.keys() == teacher.keys() == UNUSED_FIELDS.keys()
    assert (student["tensor_count"], student["stepped_count"]) == (0, 2)
    assert (teacher["tensor_count"], teacher["number_count"], teacher["stepped_count"]) == (
        2, 20, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [by_hand(), by_hand(to_none=True), by_hand(kept=True), frozen(), taking_turns(),
     asked_at_first()],
)  # fmt: skip
def test_gradients_that_somebody_uses_are_not_counted(job: Job) -> None:
    assert not any(root["tensor_count"] for root in counted(job))


def adversaries(
    *,
    critic_steps: int = 1,
    passes: int = 1,
    freeze: bool = False,
    clear: str = "before",
    graph: bool = False,
    clip: bool = False,
    skip: bool = False,
    **options: bool,
) -> Job:
    """A generator and a critic, whose optimizers take turns; what trains one asks the other."""
    generator, critic = models()
    of_generator, of_critic = optimizers = one_each(generator, critic, **options)
    both, steps = [*generator.parameters(), *critic.parameters()], itertools.count()

    def zero(optimizer: torch.optim.Optimizer, when: str) -> None:
        if clear.startswith(when):
            optimizer.zero_grad(set_to_none="zeros" not in clear)

    def step() -> None:
        for _ in range(critic_steps):
            zero(of_critic, "before")
            for _ in range(passes):
                fake = generator(torch.ones(2, 4)).detach()
                critic(fake).square().mean().backward(create_graph=graph)
            if clip:
                nn.utils.clip_grad_norm_(both, 1.0)
            if not skip or next(steps) % 2:
                of_critic.step()
            zero(of_critic, "after")
        critic.requires_grad_(not freeze)
        zero(of_generator, "before")
        critic(generator(torch.ones(2, 4))).mean().backward(create_graph=graph)
        if clip:
            nn.utils.clip_grad_norm_(both, 1.0)
        of_generator.step()
        zero(of_generator, "after")
        critic.requires_grad_()

    return [generator, critic], optimizers, step


def one_pass_for_both() -> Job:
    """Two optimizers that step after one backward pass, as of an encoder and a decoder."""
    first, second = models()
    optimizers = one_each(first, second)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(torch.ones(2, 4))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return [first, second], optimizers, step


def thrown_away(job: Job) -> list[dict[str, Any]]:
    """What is found by following the ends of optimizers' steps, by root."""
    roots, optimizers, step = job
    lines: list[dict[str, Any]] = []
    gradients = look_at(roots, optimizers, lines)
    numbers, goes_on = itertools.count(11), False

    def ends(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal goes_on
        number = next(numbers)
        if goes_on or gradients.is_due(number):
            goes_on = gradients.look(number, optimizer)

    for optimizer in optimizers:
        optimizer.register_step_post_hook(ends)
    for _ in range(12):
        step()
    assert not any(line["type"] == "settings_failed" for line in lines)
    return next((each["roots"] for each in lines if each["type"] == "discarded_gradients"), [])


@pytest.mark.parametrize(
    "job",
    [
        adversaries(),
        adversaries(critic_steps=5),
        adversaries(passes=2),
        adversaries(clip=True),
        adversaries(fused=True),
    ],
)
def test_gradients_that_another_optimizers_pass_makes_in_vain_are_counted(job: Job) -> None:
    generator, critic = thrown_away(job)
    assert generator.keys() == critic.keys() == DISCARDED_FIELDS.keys()
    assert (generator["tensor_count"], critic["tensor_count"]) == (0, 2)
    assert (critic["number_count"], critic["by"]) == (20, [1])


def test_of_two_that_make_gradients_in_vain_for_each_other_both_are_counted() -> None:
    first, second = thrown_away(taking_turns())
    assert (first["tensor_count"], first["by"]) == (2, [2])
    assert (second["tensor_count"], second["by"]) == (2, [1])


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "job",
    [
        adversaries(freeze=True), adversaries(freeze=True, clip=True),
        adversaries(freeze=True, skip=True), adversaries(freeze=True, fused=True),
        one_pass_for_both(), distill(),
        adversaries(clear="never"), adversaries(clear="after"),  # added up
        adversaries(clear="before, zeros"),  # not known: the same tensor, filled with zeros
        adversaries(clear="never", graph=True),  # added up in a new tensor
    ],
)  # fmt: skip
def test_gradients_that_their_own_step_may_use_are_not_called_discarded(job: Job) -> None:
    assert thrown_away(job) == []


def test_a_parameter_whose_memory_was_freed_is_not_read() -> None:
    """As FSDP does after backward: it keeps its shape, and its gradient."""
    roots, optimizers, step = distill()
    freed = nn.Parameter(torch.ones(1 << 20))
    roots[1].register_parameter("own", freed)

    def then_free() -> None:
        step()
        freed.grad = torch.ones(1 << 20)
        freed.untyped_storage().resize_(0)

    _, teacher = counted((roots, optimizers, then_free))
    assert teacher["tensor_count"] == 2


@pytest.mark.parametrize("kind", ["channels last", "complex", "of nothing"])
def test_parameters_of_any_kind_are_looked_at(kind: str) -> None:
    own = {"channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
           "complex": torch.ones(4, dtype=torch.complex64),
           "of nothing": torch.ones(0)}  # fmt: skip
    roots, optimizers, step = distill(both(set_to_none=True))
    roots[1].register_parameter("own", nn.Parameter(own[kind]))

    def with_own() -> None:
        step()
        roots[1].own.abs().sum().backward()  # type: ignore[operator]

    _, teacher = counted((roots, optimizers, with_own))
    assert teacher["tensor_count"] >= 2


@pytest.mark.parametrize(
    ("graph", "passed"),
    [
        (lambda trained, asked, x: trained(x) - asked(x), set()),  # a teacher
        (lambda trained, asked, x: trained(asked(x)), set()),  # a backbone
        (lambda trained, asked, x: asked(trained(x)), {0, 1, 2}),  # a loss that is a network
        (lambda trained, asked, x: trained(x), None),  # another backward pass of the job's
    ],
)  # fmt: skip
def test_layers_that_a_gradient_has_to_pass_are_known(
    graph: Callable[..., torch.Tensor], passed: set[int] | None
) -> None:
    trained = nn.Linear(4, 4)
    asked = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4))
    unused = list(asked.parameters())
    keys = {id(parameter): number for number, parameter in enumerate(unused)}
    loss = graph(trained, asked, torch.ones(2, 4)).square().mean()
    found = object_settings._passed_through([loss], set(keys))
    assert (None if found is None else {keys[each] for each in found}) == passed


def test_no_gradient_passes_an_embedding() -> None:
    table, layer = nn.Embedding(9, 4), nn.Linear(4, 4)
    hidden = table(torch.ones(3, dtype=torch.long))
    loss = (hidden + layer(hidden)).sum()
    assert object_settings._passed_through([loss], {id(table.weight)}) == set()


def test_nothing_is_looked_at_again_where_each_gradient_is_used() -> None:
    roots, optimizers, step = frozen()
    gradients = look_at(roots, optimizers, [])
    step()
    assert not gradients.is_due(10), "in the first steps"
    for number in (11, 22):  # another optimizer may come later
        assert gradients.is_due(number)
        gradients.look(number, optimizers[0])
    assert not gradients.is_due(1000)


def test_nothing_is_read_while_the_job_follows_calls_of_torch() -> None:
    roots, optimizers, step = distill()
    lines: list[dict[str, Any]] = []
    gradients = look_at(roots, optimizers, lines)
    step()
    with TorchFunctionMode():
        gradients.look(11, optimizers[0])
    assert gradients.is_due(11)
    assert lines == []


class Counter:
    """What a debugging session left behind."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        pass

    def method(self, frame: FrameType, event: str, argument: object) -> None:
        pass


def test_functions_that_python_calls_at_each_call_are_named() -> None:
    hooks = CallHooks()
    hooks.look()
    assert hooks.entries() == [], "nothing is set"
    before = sys.getprofile()
    for hook in (Counter(), Counter().method, print):
        sys.setprofile(hook)
        try:
            hooks.look()
            hooks.look()
        finally:
            sys.setprofile(before)
    found = hooks.entries()
    assert all(each.keys() == HOOK_FIELDS.keys() for each in found)
    assert {each["count"] for each in found} == {2}
    assert {each["sets"] for each in found} == {"sys.setprofile"}
    line = Counter.__call__.__code__.co_firstlineno
    called, method, in_c = found
    assert called["function"].endswith("__call__")
    assert (called["file"], called["line"]) == (__file__, line)
    assert method["function"].endswith("method")
    assert (in_c["function"], in_c["file"]) == ("builtins.builtin_function_or_method", None)
    assert hooks.look_count == 7


def test_a_handler_of_a_timers_signal_is_named() -> None:
    hooks = CallHooks()
    before = signal.signal(signal.SIGVTALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_VIRTUAL, 60, 60)
    try:
        hooks.look()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    hooks.look()
    (found,) = hooks.entries()
    assert (found["sets"], found["file"], found["count"]) == ("signal.setitimer", __file__, 1)
