"""Text of a comparison: the table of steps, the largest differences, the verdict, and likely causes."""

from __future__ import annotations

from dlo_framework.testing.comparison import Comparison, Pair

#: Most tensors that a report names.
_SHOWN_TENSORS = 8


def report(comparison: Comparison, steps: bool = True) -> str:
    """Returns a comparison as text.

    Args:
        comparison: Comparison to report.
        steps: Whether to include the table of all steps.
    """
    lines = [f"made equal or switched off: {note}" for note in comparison.notes]
    if steps:
        lines += ["", *table(comparison)]
    lines += ["", *summary(comparison)]
    return "\n".join(lines).strip("\n")


def table(comparison: Comparison) -> list[str]:
    """Returns the steps as lines of a table; the line of a step out of its limits ends in ``<``."""
    head = f"{'step':>5}  {'loss, 1 process':>16}  {'loss, ranks':>16}  {'diff':>7}"
    lines = [head + f"  {'grad norm, 1':>14}  {'ranks':>14}  {'diff':>7}"]
    for row in comparison.rows:
        text = f"{row.step:>5}  {_numbers(row.loss, 16)}  {_numbers(row.norm, 14)}"
        lines.append(text if row.ok else f"{text}  <")
    return lines


def _numbers(pair: Pair | None, width: int) -> str:
    if pair is None:
        return f"{'-':>{width}}  {'-':>{width}}  {'-':>7}"
    return f"{pair.one:>{width}.8g}  {pair.ranks:>{width}.8g}  {pair.difference:>7.1e}"


def summary(comparison: Comparison) -> list[str]:
    """Returns the largest differences, the verdict and the hints."""
    lines = _differences(comparison)
    if comparison.double is not None:
        lines += ["", "in double precision:", *(f"  {line}" for line in _differences(comparison.double)), ""]
    if comparison.double_refusal is not None:
        lines.append(f"in double precision: not compared ({comparison.double_refusal}); other rounding decides")
    if comparison.control is not None:
        lines.append(
            f"other rounding alone changes one process by: loss {comparison.control[0]:.1e}, gradient norm"
            f" {comparison.control[1]:.1e}"
        )
    lines.append(_verdict(comparison))
    return lines + [f"{'note' if comparison.ok else 'likely'}: {hint}" for hint in comparison.hints]


def _differences(comparison: Comparison) -> list[str]:
    """Returns lines on the largest differences, with the tensors that are out of their limits first."""
    lines = []
    for what, title in (("loss", "loss"), ("norm", "gradient norm")):
        worst = comparison.worst(what)
        if worst is None:
            lines.append(f"{title}: not compared, because a run did not record it")
            continue
        step, pair = worst
        lines.append(
            f"{title}: largest difference {pair.difference:.1e} at step {step}"
            f" ({pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks)"
        )
    for name, pair in comparison.validation.items():
        lines.append(
            f"{name} at the end: difference {pair.difference:.1e}"
            f" ({pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks){'' if pair.ok else '  <'}"
        )
    if comparison.spread is not None:
        lines.append(f"weights at the end: difference {comparison.spread:.1e} of their norm")
    broken = comparison.culprits
    for name in broken[:_SHOWN_TENSORS]:
        tensor = comparison.tensors[name]
        lines.append(f"  {name}: difference {tensor.difference:.1e} of its change, allowed {tensor.limit:.1e}  <")
    if len(broken) > _SHOWN_TENSORS:
        lines.append(f"  and {len(broken) - _SHOWN_TENSORS} more tensors")
    if not broken and comparison.tensors:
        name = max(comparison.tensors, key=lambda name: comparison.tensors[name].difference)
        tensor = comparison.tensors[name]
        if tensor.difference:
            lines.append(f"  most in {name}: {tensor.difference:.1e} of its change, allowed {tensor.limit:.1e}")
    if comparison.without_gradient:
        count = sum(comparison.without_gradient.values())
        names = list(comparison.without_gradient)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"left out: {count} elements whose gradient is zero up to rounding, in {names[0]}{others}")
    return lines


def _verdict(comparison: Comparison) -> str:
    steps = f"{len(comparison.rows)} steps"
    if comparison.ok:
        pairs = [pair for row in comparison.rows for pair in (row.loss, row.norm) if pair is not None]
        strict = all(pair.difference <= comparison.rtol for pair in pairs)
        within = f"within {comparison.rtol:g}" if strict else "within rounding"
        double = f", in double precision within {comparison.double.rtol:g}" if comparison.double is not None else ""
        return f"PARITY: {comparison.name}: {steps} {within}{double}"
    if comparison.untrained is not None:
        return f"NO PARITY: {comparison.name}: nothing was trained: {comparison.untrained}"
    in_double = comparison.double is not None and not comparison.double.within
    shown = comparison.double if comparison.double is not None and in_double else comparison
    broken = next((row.step for row in shown.rows if not row.ok), None)
    metrics = [name for name, pair in shown.validation.items() if not pair.ok]
    where = f"from step {broken} on" if broken is not None else "in the final weights or optimizer state"
    if broken is None and not shown.culprits and metrics:
        where = f"in validation ({', '.join(metrics)})"
    precision = ", in double precision too" if in_double else ""
    if comparison.double is not None and not in_double:
        precision = ", in single precision only, with another seed too"
    return f"NO PARITY: {comparison.name}: differs {where}{precision}"
