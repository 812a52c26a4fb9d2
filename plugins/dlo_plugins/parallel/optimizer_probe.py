"""Probes whether an optimizer's update of an element depends on that element, on its full tensor, or on all tensors.

The probe runs the optimizer instead of looking up its name. So it is right for a user's own optimizer too, and for a
flag that changes the update (timm's ``caution`` takes a mean over the tensor).

It looks three times. First it compares the updates of small tensors that are stepped together, alone, and cut. An
update can pass that and still read the full tensor: only from a size on (timm's ``adafactorbv`` factors from 16 rows
and columns), or only if a condition on the tensor holds (``adamp`` projects where gradient and weight are nearly
orthogonal). So it then looks at the operators of a step on tensors of the parameters' own shapes. Operators of other
libraries and of tensor subclasses cannot be seen, such as those of a block-wise quantised state, whose blocks share a
scale. So it looks at the shapes of the state too: a tensor of several values that are not one an element belongs to no
element alone.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections import defaultdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves
from dlo_framework.local_memory import local_tensor

Kind = Literal["elementwise", "tensor", "all"]
_STEPS = 3
_SHAPES = ((6, 4), (4, 8))
#: Largest number of elements of a tensor whose step's operators are looked at; larger dims are halved.
_MOST_ELEMENTS = 2**18
#: Operators on several elements that combine none; also all views, and torch's pointwise, foreach and fused operators.
_COPIES = {"_to_copy", "_unsafe_view", "cat", "clone", "copy", "copy_", "detach", "fill_", "index", "index_put_"}
_COPIES |= {"lift_fresh", "masked_fill", "masked_fill_", "stack", "zero_"}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max"}
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def probe_optimizer(optimizer: Optimizer) -> Kind:
    """Returns what an optimizer's update of an element depends on.

    A copy of the optimizer takes a few steps on small tensors, with the settings of each parameter group in turn: on
    two full tensors, on one of them alone, and on that one cut in two. If these agree, it takes steps on tensors of the
    parameters' shapes, until an operator combines elements of a tensor. If the class sets ``needs_full_tensors``, the
    optimizer gets full tensors in any case: the probe takes three steps, and cannot see what comes later.

    Returns:
        Kind of the update: ``"elementwise"`` if it depends on that element's gradients alone, ``"tensor"`` if on others
        of its tensor too, ``"all"`` if on other tensors too.
    """
    kinds = {_probe_group(optimizer, group) for group in optimizer.param_groups}
    if getattr(optimizer, "needs_full_tensors", False):
        kinds.add("tensor")
    return next((kind for kind in ("all", "tensor") if kind in kinds), "elementwise")


def _probe_group(optimizer: Optimizer, group: dict[str, Any]) -> Kind:
    # Parameters of other pipeline stages are on the meta device.
    held = [parameter for parameter in group["params"] if not parameter.is_meta]
    device = held[0].device if held else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(device) for shape in _SHAPES]
    # Large, so that an optimizer that clips by the global norm does clip.
    gradients = [[10 * torch.randn(shape, generator=generator).to(device) for shape in _SHAPES] for _ in range(_STEPS)]
    together = _stepped(optimizer, group, weights, gradients)
    alone = _stepped(optimizer, group, weights[:1], [step[:1] for step in gradients])
    if not _same(together[0], alone[0]):
        return "all"
    half = weights[0].numel() // 2 - 1  # not at the end of a row
    try:
        cut = _stepped(
            optimizer,
            group,
            list(weights[0].flatten().split([half, weights[0].numel() - half])),
            [list(step[0].flatten().split([half, weights[0].numel() - half])) for step in gradients],
        )
    except (RuntimeError, ValueError, IndexError):
        return "tensor"  # The optimizer needs two dims, as Muon does, and raised.
    if not _same(torch.cat(cut), alone[0].flatten()) or _combines_elements(optimizer, group, device):
        return "tensor"
    return "elementwise"


def changed_settings(optimizer: Optimizer) -> tuple[list[str], list[str]]:
    """Returns the settings of parameter groups that a step changes.

    Returns:
        Names of those that count steps, whatever the tensors and gradients are, and names of the others.
    """
    generator, changed, by_values = torch.Generator().manual_seed(0), set[str](), set[str]()
    for group in optimizer.param_groups:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        runs = []
        for scale, count in ((1.0, 1), (1.0, 2), (30.0, 2)):
            weight, *gradients = (
                scale * torch.randn(_SHAPES[0], generator=generator).to(device) for _ in range(count + 1)
            )
            stepped = step_trial(optimizer, group, [weight], [[gradient] for gradient in gradients])[0]
            runs.append({name: value for name, value in stepped.param_groups[0].items() if name != "params"})
        once, twice, otherwise = runs
        different = {name for name, value in twice.items() if not _equal(value, once.get(name))}
        by_values |= {name for name, value in twice.items() if not _equal(value, otherwise.get(name))}
        changed |= different
    return sorted(changed - by_values), sorted(by_values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _combines_elements(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Returns whether an operator of a step on tensors of the parameters' shapes combines elements of a tensor."""
    shapes = {shrink_shape(tuple(parameter.shape)) for parameter in group["params"] if parameter.numel()}
    generator = torch.Generator().manual_seed(0)
    for shape in sorted(shapes | {(256, 256)}):
        weight, *gradients = (torch.randn(shape, generator=generator).to(device) for _ in range(_STEPS + 1))
        try:
            with _ElementwiseOnly():
                trial, parameters = step_trial(optimizer, group, [weight], [[gradient] for gradient in gradients])
        except _CombinedElementsError:
            return True
        if any(_is_shared(value, parameters[0]) for value in _state_of(trial, parameters[0])):
            return True
    return False


def _is_shared(value: Any, parameter: Tensor) -> bool:
    """Returns whether a tensor of the state belongs to several elements of a parameter, such as scales of blocks."""
    if not isinstance(value, Tensor):
        return False
    return type(value) is not Tensor or (value.numel() > 1 and value.shape != parameter.shape)


def _state_of(trial: Optimizer, parameter: Tensor) -> list[Any]:
    """Returns the values in a parameter's state, those of wrapped optimizers included."""
    inner = [value for value in vars(trial).values() if isinstance(value, Optimizer)]
    return [leaf for one in (trial, *inner) for leaf in tree_leaves(dict(one.state.get(parameter, {})))]


def shrink_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape whose largest dims are halved until it has few enough elements."""
    dims = list(shape)
    while math.prod(dims) > _MOST_ELEMENTS:
        dims[dims.index(max(dims))] //= 2
    return tuple(dims)


class _CombinedElementsError(Exception):
    """An operator has combined elements of a tensor."""


class _ElementwiseOnly(TorchDispatchMode):
    """Mode that raises at the first of torch's operators that combines elements of a tensor.

    Operators of other libraries are unknown, and pass: what they do to small tensors has been compared.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, or raises."""
        several = any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves((args, kwargs)))
        if several and func.namespace == "aten" and _may_combine(func):
            raise _CombinedElementsError(str(func))
        return func(*args, **(kwargs or {}))


def _may_combine(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return name in _FOREACH_REDUCTIONS
    plain = name.startswith("_fused_") or name.endswith("_like") or name.startswith("new_") or name in _COPIES
    return not (plain or func.is_view or torch.Tag.pointwise in func.tags)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], weights: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """Returns the weights after a copy of the optimizer has stepped them, with one gradient per weight and step."""
    return [parameter.detach() for parameter in step_trial(optimizer, group, weights, gradients)[1]]


def step_trial(
    optimizer: Optimizer, group: dict[str, Any], weights: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[Optimizer, list[Tensor]]:
    """Returns a copy of the optimizer and the parameters that it has stepped, with one gradient per weight and step."""
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    # A warm-up starts at lr 0, where no update can be seen.
    settings["lr"] = max(float(settings["lr"]), 1e-2) if "lr" in settings else 1e-2
    if not isinstance(settings.get("weight_decay", True), bool):
        settings["weight_decay"] = max(float(settings["weight_decay"]), 1e-2)  # Without decay, LARS ignores norms.
    try:
        return _run_trial(optimizer, settings, weights, gradients, has_state=False)
    except KeyError:
        if not optimizer.state:
            raise
        return _run_trial(optimizer, settings, weights, gradients, has_state=True)


def _run_trial(
    optimizer: Optimizer,
    settings: dict[str, Any],
    weights: list[Tensor],
    gradients: list[list[Tensor]],
    *,
    has_state: bool,
) -> tuple[Optimizer, list[Tensor]]:
    parameters: list[Tensor] = [torch.nn.Parameter(weight.clone()) for weight in weights]
    trial = _trial(optimizer, [{**copy.deepcopy(settings), "params": parameters}], has_state)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        _step(trial)
    return trial, parameters


def requires_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's ``step`` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _step(trial: Optimizer) -> None:
    """Takes a step, with a closure where ``step`` requires one."""
    step: Any = type(trial).step
    if requires_closure(trial):
        step(trial, lambda: torch.zeros(()))
    else:
        step(trial)


def _trial(optimizer: Optimizer, groups: list[dict[str, Any]], has_state: bool) -> Optimizer:
    """Returns a copy of an optimizer and of the optimizers that it wraps; it steps other groups.

    The copy has no state, which the run may have loaded, or the state that the constructor makes.

    ``copy.copy`` does not do: the ``__getstate__`` of torch's optimizers leaves a subclass's own attributes out.
    """
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # A scheduler has wrapped the original's, to count its calls.
        if isinstance(value, Optimizer):
            value = _trial(value, groups, has_state)
        elif isinstance(value, dict | list | set):
            value = type(value)() if name in _HOOKS else copy.copy(value)
        elif isinstance(value, Tensor):
            value = value.clone()
        setattr(trial, name, value)
    trial.param_groups = groups
    trial.state = defaultdict(dict)
    has_state = has_state and bool(optimizer.state)
    for parameter in (parameter for group in groups for parameter in group["params"]) if has_state else ():
        trial.state[parameter] = _first_state(optimizer, parameter)
    return trial


def _first_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns a parameter's state as the constructor made it: torch's Adagrad fills each tensor with one value."""
    made = max(((len(p.shape), state) for p, state in optimizer.state.items()), key=operator.itemgetter(0))[1]
    return {
        name: torch.full_like(
            parameter, local_tensor(value).flatten()[:1].sum().item(), dtype=value.dtype, requires_grad=False
        )
        if isinstance(value, Tensor) and value.ndim
        else copy.deepcopy(value)
        for name, value in made.items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)
