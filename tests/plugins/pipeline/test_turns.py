"""Turns of a forward and a backward: their order, their states, and their errors."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from dlo_framework.experts.step_counts import get_micro_batch, in_micro_batch
from dlo_plugins.pipeline.random_state import get_random_state
from dlo_plugins.pipeline.turns import Turns


@pytest.fixture
def turns() -> Turns:
    return Turns(torch.device("cpu"))


def steps(turns: Turns, log: list[str], name: str, count: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(count):
            log.append(f"{name}{number}")
            turns.pass_on()
        log.append(f"{name} ends")

    return run


@pytest.mark.parametrize(
    ("forwards", "backwards", "expected"),
    [
        (2, 2, "F0 B0 F1 B1 F ends B ends"),
        (0, 2, "F ends B0 B1 B ends"),
        (2, 0, "F0 B ends F1 F ends"),
        (1, 3, "F0 B0 F ends B1 B2 B ends"),
        (0, 0, "F ends B ends"),
    ],
)
def test_turns_pass_at_each_exchange_and_never_wait_for_a_side_that_has_none(
    turns: Turns, forwards: int, backwards: int, expected: str
) -> None:
    for _ in range(3):
        log: list[str] = []
        turns.run(steps(turns, log, "F", forwards), steps(turns, log, "B", backwards))
        assert " ".join(log) == expected
    assert not turns.is_shared
    assert not turns.pass_on()


class _Exchange(torch.autograd.Function):
    """Passes the turn in backward, and maybe in forward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, turns: Turns, log: list[str], name: str) -> Tensor:
        ctx.turns, ctx.log, ctx.name = turns, log, name
        log.append(f"{name} forward {turns.pass_on()}")
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.log.append(f"{ctx.name} backward {ctx.turns.pass_on()}")
        return gradient * 2, None, None, None


def test_a_backward_of_autograd_takes_turns_and_its_callbacks_run_after_the_forward(turns: Turns) -> None:
    log: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    result = _Exchange.apply(leaf, turns, log, "B")
    result.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: log.append("end")))
    log.clear()

    def forward() -> None:
        for _ in range(3):
            _Exchange.apply(leaf.detach(), turns, log, "F")
        log.append("F ends")

    turns.run(forward, lambda: torch.autograd.backward(turns.end_last(result), torch.ones(2)))
    # The last exchange of the forward finds a backward that has only its end to do.
    assert log == ["F forward True", "B backward True", "F forward True", "F forward False", "F ends", "end"]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2]


def raises(turns: Turns, error: BaseException, after: int = 1) -> Callable[[], None]:
    def run() -> None:
        for _ in range(after):
            turns.pass_on()
        raise error

    return run


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("is_forward", [True, False])
def test_the_first_error_ends_both_sides(turns: Turns, is_forward: bool, after: int) -> None:
    log: list[str] = []
    wrong, right = raises(turns, ValueError("first"), after), steps(turns, log, "S", 9)
    sides = (wrong, right) if is_forward else (right, wrong)
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            turns.run(*sides)
    assert "S ends" not in log
    # The other side has computed in its turns only: before the error, never after it.
    assert len(log) == 2 * (after + (not is_forward))
    turns.run(steps(turns, log, "F", 1), steps(turns, log, "B", 1))
    assert log[-4:] == ["F0", "B0", "F ends", "B ends"]


def test_an_error_of_the_forward_ends_a_backward_inside_autograd(turns: Turns) -> None:
    log: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    for count in (1, 3):  # It stands at its end, or in its second exchange.
        result = leaf
        for _ in range(count):
            result = _Exchange.apply(result, turns, log, "B")
        with pytest.raises(KeyboardInterrupt):
            turns.run(
                raises(turns, KeyboardInterrupt(), after=2),
                lambda result=result: torch.autograd.backward(turns.end_last(result), torch.ones(2)),  # type: ignore[misc]
            )
        assert not turns.is_shared
    assert leaf.grad is None or count == 3


def test_each_side_draws_its_own_random_numbers_and_those_of_the_forward_count(turns: Turns) -> None:
    leaf = torch.ones(64, requires_grad=True)
    log: list[str] = []

    def inner(value: Tensor) -> Tensor:
        value = torch.nn.functional.dropout(value, 0.5)
        value = _Exchange.apply(value, turns, log, "B")
        return torch.nn.functional.dropout(value, 0.5) * value

    def run(together: bool) -> tuple[Tensor, list[Tensor], Tensor]:
        torch.manual_seed(0)
        leaf.grad, found = None, list[Tensor]()
        result = checkpoint(inner, leaf, use_reentrant=False)

        def forward() -> None:
            for _ in range(4):
                found.append(torch.rand(3))
                turns.pass_on()

        def backward() -> None:
            torch.autograd.backward(result, torch.ones(64))

        if together:
            turns.run(forward, backward)
        else:
            forward()
            backward()
        assert leaf.grad is not None
        return leaf.grad, found, get_random_state(torch.device("cpu"))[0]

    (gradient, drawn, state), (own, alone, after) = run(True), run(False)
    assert "B forward True" in log  # In recomputation.
    assert torch.equal(gradient, own)
    assert torch.equal(torch.stack(drawn), torch.stack(alone))
    assert torch.equal(state, after)


def test_each_side_has_its_own_micro_batch_and_kept_values(turns: Turns) -> None:
    value, seen = {"rows": "before"}, []
    turns.keep(lambda: value["rows"], lambda rows: value.update(rows=rows))

    def side(name: str) -> None:
        with in_micro_batch(name):
            value["rows"] = name
            for _ in range(3):
                turns.pass_on()
                seen.append((name, get_micro_batch(), value["rows"]))

    turns.run(lambda: side("F"), lambda: side("B"))
    assert len(seen) == 6
    assert all(key == (name, False) and rows == name for name, key, rows in seen)
    assert get_micro_batch() == (None, False)
    assert value["rows"] == "F"


_CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("context", default="none")


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


def thread_state() -> dict[str, Any]:
    from torch.overrides import _get_current_function_mode_stack as functions
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as operations

    return {
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "modes": (functions(), operations()),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "context": _CONTEXT.get(),
    }


def test_the_backward_s_thread_has_the_state_of_the_calling_thread(turns: Turns) -> None:
    found: list[dict[str, Any]] = []

    def note() -> None:
        torch.ones(1) + 1
        found.append(thread_state())

    def nothing() -> None:
        pass

    token = _CONTEXT.set("ours")
    turns.run(nothing, note)
    mode = _Operations()
    with (
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        torch.no_grad(),
        _Functions(),
        mode,
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        expected = thread_state()
        turns.run(nothing, note)
    assert mode.threads
    assert threading.get_ident() not in mode.threads
    turns.run(nothing, note)
    assert found[1] == expected
    assert found[0] == found[2] == thread_state()
    _CONTEXT.reset(token)


def test_the_backward_s_autocast_leaves_the_forward_s_casts(turns: Turns) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    casts: list[Any] = []

    def forward() -> None:
        for _ in range(2):
            casts.append(torch.mm(torch.ones(2, 2), weight).grad_fn.next_functions[1][0])
            turns.pass_on()

    def backward() -> None:
        with torch.autocast("cpu", enabled=False):
            pass
        turns.pass_on()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        turns.run(forward, backward)
    assert casts[0] is casts[1]  # One cast of the weight for both, whose gradients it sums.


def test_modes_that_both_sides_enter_leave_torch_s_notes_right(turns: Turns) -> None:
    notes: list[bool] = []

    def side() -> None:
        notes.append(is_in_torch_dispatch_mode())
        with _Operations():
            turns.pass_on()
            notes.append(is_in_torch_dispatch_mode())
        notes.append(is_in_torch_dispatch_mode())

    turns.run(side, side)
    assert sorted(notes) == [False] * 4 + [True] * 2
    assert not is_in_torch_dispatch_mode()


def test_nothing_of_a_pair_is_kept(turns: Turns) -> None:
    kept = []
    for error in (None, ValueError("wrong")):
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))

        def backward(tensor: Tensor = tensor, error: BaseException | None = error) -> None:
            turns.pass_on()
            if error is not None:
                raise error

        with contextlib.suppress(ValueError):
            turns.run(lambda: None, backward)
        del tensor, backward, error
    turns.run(lambda: None, lambda: None)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    ended = next(thread for thread in threading.enumerate() if thread.name == "dlo-backward" and thread.daemon)
    assert ended.is_alive()


def test_its_thread_ends_with_it() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "dlo-backward"}
    turns = Turns(torch.device("cpu"))
    turns.run(lambda: None, lambda: None)
    (own,) = {thread for thread in threading.enumerate() if thread.name == "dlo-backward"} - before
    del turns
    own.join(timeout=30)
    assert not own.is_alive()
