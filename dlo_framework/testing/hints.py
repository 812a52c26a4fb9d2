"""Hints at likely causes of a difference between a run on several ranks and one process."""

from __future__ import annotations

import math

from dlo_framework.testing.comparison import Comparison, relative
from dlo_framework.testing.record import Record

#: Relative change of losses by rounding above which little is left to compare.
_CHAOTIC = 1e-3


def hints(comparison: Comparison, one: Record, ranks: Record) -> list[str]:
    """Returns what differs first and the likely causes, the most certain first; no cause without a difference."""
    causes = _causes(comparison, one, ranks)
    if comparison.within or not comparison.rows or comparison.untrained is not None:
        return causes
    return [*first_difference(comparison), *causes]


def first_difference(comparison: Comparison) -> list[str]:
    """Returns a line about the first quantity that is out of its limit: of a step, or a tensor at the end."""
    pairs = ((f"{what} of step {row.step}", pair) for row in comparison.rows for what, pair in row.pairs if not pair.ok)
    what, pair = next(pairs, (None, None))
    names = comparison.culprits
    tensor = f"'{names[0]}' ({comparison.tensors[names[0]].difference:.1e} of its change)" if names else ""
    if pair is None:
        return [f"the first difference is in {tensor} at the end"] if names else []
    most = f"; at the end {tensor} differs most" if names else ""
    return [f"the first difference is the {what}: {pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks{most}"]


def _causes(comparison: Comparison, one: Record, ranks: Record) -> list[str]:
    found = []
    rows = comparison.rows
    if comparison.control is not None and comparison.control[0] > _CHAOTIC:
        found.append(
            f"rounding alone changes the losses of one process by up to {comparison.control[0]:.0e}, so that the last"
            " steps prove little: compare fewer steps, at a lower learning rate, or with --trainer.precision 64-true"
        )
    if comparison.within:
        return found
    if not rows:
        return ["no step was compared: the runs made no optimizer step"]
    if comparison.untrained is not None:
        return [
            f"nothing was trained: {comparison.untrained}. A model that does not learn agrees with any other that does"
            " not; check the learning rate, the optimizer's parameters and the loss that training_step returns"
        ]
    if len(one.steps) != len(ranks.steps):
        found.append(f"one process made {len(one.steps)} steps and the ranks {len(ranks.steps)}: their data differ")
    apart = next(
        (i for i, (a, b) in enumerate(zip(one.steps, ranks.steps, strict=False)) if a.digest != b.digest), None
    )
    if apart is not None:
        sizes = f"{one.steps[apart].samples} samples in one process, {ranks.steps[apart].samples} on the ranks"
        found.append(
            f"the batches of step {apart} are not the same ({sizes}): the ranks see other data than one process, or"
            " augment or mix it with their own random numbers"
        )
    if one.initial != ranks.initial:
        names = [name for name in one.initial if one.initial[name] != ranks.initial.get(name)]
        found.append(f"the weights differ before the first step, {len(names)} tensors: {', '.join(names[:3])} ...")
    drew = [record.drew for record in (one, ranks) if record.drew is not None]
    if drew:
        found.append(
            f"training_step draws random numbers (first at step {min(drew)}), different ones on each rank, and not for"
            " a known dropout module: switch it off"
        )
    if ranks.batch_norms:
        found.append(
            f"BatchNorm statistics are per rank ({ranks.batch_norms} layers): use sync_batchnorm: true in the trainer"
            " (on accelerators), or a norm within each sample, such as GroupNorm"
        )
    first = rows[0].loss
    size = max(1, ranks.place[1])
    if first is not None and size > 1 and relative(first.one, size * first.ranks, 0.0) < 1e-3:
        found.append(
            f"the loss of one process is {size} times that of {size} ranks: a sum over the batch. Strategies average"
            " gradients over ranks, so return the mean"
        )
    if not all(math.isfinite(pair.one) for row in rows for pair in (row.loss, row.norm) if pair is not None):
        found.append("losses or gradients are not finite in one process either: the recipe itself diverges")
    trained_alike = all(row.ok for row in rows) and all(pair.ok for pair in comparison.tensors.values())
    if trained_alike and not found:
        return [
            "training agrees, validation does not: ranks see other samples than one process (a padded last batch, a"
            " sampler), or each logs its own value: log with sync_dist=True, and weigh means by their number of samples"
        ]
    if rows[0].ok and not found:
        found.append(
            "the first step's loss and gradients agree: the cause comes after them, in the optimizer's step, clipping"
            " or the exchange of weights"
        )
    return found or ["the first step differs already: check the forward pass, the loss's mean, the gradients' average"]
