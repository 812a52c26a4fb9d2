"""Optimizers by name on two ranks: the numbers of a plain loop under each strategy, and of a resumed run."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from dlo_framework.testing import run_distributed
from support.optimizer_runs import STRATEGIES, compare

#: One of each library, each under another strategy; the slow test has all.
SOME = {"adamw8bit": ("tp",), "bnbadamw8bit": ("zero1",), "normuon": ("fsdp",), "adamw_schedulefree": ("zero3",)}
ALL = dict.fromkeys(sorted(metadata.entry_points(group="dlo_framework.optimizers").names), tuple(STRATEGIES))


#: Largest differences under tp, whose sums round in another order: a code of a quantised state may round away, and Muon
#: iterates in bf16. SOAP's first basis of a gradient's null space is arbitrary, so that rounding decides: the bound in
#: test_tensor_behaviour is for gradients that have none.
TP = {"normuon": 3e-2, "bnbrmsprop8bit": 2e-2, "bnbadagrad8bit": 2e-2, "soap": float("inf")}


@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_each_strategy_has_the_numbers_of_a_plain_loop_and_resumes_to_the_bit(
    tmp_path: Path, cases: dict[str, tuple[str, ...]]
) -> None:
    ranks = run_distributed(compare, 2, tmp_path, cases, timeout=900)
    raised = [value for value in ranks[0].values() if isinstance(value, str)]
    assert not raised, raised[0]
    assert len(ranks[0]) == sum(map(len, cases.values()))
    for rank in ranks:
        for run, (difference, resumed) in rank.items():
            name, strategy = run.split()
            assert resumed == 0.0, f"{run} resumes with a difference of {resumed}"
            assert difference <= (TP.get(name, 5e-3) if strategy == "tp" else 0.0), f"{run}: {difference}"
