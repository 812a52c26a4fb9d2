"""A comparison as text: the steps in a table, the largest differences, the verdict, and what is likely."""

from __future__ import annotations

from dlo_framework.testing.comparison import Comparison, Pair

#: Weights that are named in a report.
_SHOWN_WEIGHTS = 5


def report(comparison: Comparison, steps: bool = True) -> str:
    """Returns the whole comparison as text.

    Args:
        comparison: what to tell.
        steps: with the table of all steps.
    """
    lines = [f"made equal or switched off: {note}" for note in comparison.notes]
    if steps:
        lines += ["", *table(comparison)]
    lines += ["", *summary(comparison)]
    return "\n".join(lines).strip("\n")


def table(comparison: Comparison) -> list[str]:
    """Returns the steps as lines of a table; a step that is out of its limits ends in ``<``."""
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
    lines = []
    for what, title in (("loss", "loss"), ("norm", "gradient norm")):
        worst = comparison.worst(what)
        if worst is None:
            lines.append(f"{title}: not compared; a run does not tell it")
            continue
        step, pair = worst
        lines.append(
            f"{title}: largest difference {pair.difference:.1e} at step {step}"
            f" ({pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks)"
        )
    if comparison.spread is not None:
        lines.append(f"weights at the end: difference {comparison.spread:.1e} of their norm")
    names = sorted(comparison.weights, key=lambda name: -comparison.weights[name])[:_SHOWN_WEIGHTS]
    for name in names:
        difference, limit = comparison.weights[name], comparison.weight_limits[name]
        if difference > comparison.rtol:
            remark = "too much" if difference > limit else f"rounding: up to {limit:.1e} is"
            lines.append(f"  {name}: {difference:.1e} of its largest element, {remark}")
    if comparison.control is not None:
        lines.append(
            f"control: one process, each batch's samples in the opposite order: loss {comparison.control[0]:.1e},"
            f" gradient norm {comparison.control[1]:.1e}; ten times what rounding does there is allowed"
        )
    lines.append(_verdict(comparison))
    if not comparison.ok or comparison.hints:
        lines += [f"likely: {hint}" if not comparison.ok else f"note: {hint}" for hint in comparison.hints]
    return lines


def _verdict(comparison: Comparison) -> str:
    if comparison.ok:
        pairs = [pair for row in comparison.rows for pair in (row.loss, row.norm) if pair is not None]
        strict = all(pair.difference <= comparison.rtol for pair in pairs)
        within = f"within {comparison.rtol:g}" if strict else "within rounding"
        return f"PARITY: {comparison.name}: {len(comparison.rows)} steps {within}"
    broken = next((row.step for row in comparison.rows if not row.ok), None)
    where = f"from step {broken} on" if broken is not None else "in the final weights"
    return f"NO PARITY: {comparison.name}: differs {where}"
