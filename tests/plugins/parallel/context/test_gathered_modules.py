"""Models of which ranks share the sequence, also those that mix positions in other ways: ranks equal one process."""

from functools import partial
from typing import Any

import pytest

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.context.context_parallel import ContextParallel, outermost
from dlo_plugins.parallel.context.gathered_modules import find_parts
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import TYPES, tiny
from support.shared_sequences import compare, inspect_sequence
from support.token_batches import VOCABULARY, Tokens

#: Types of each way: shared attention (plain, with a window, a cap or sinks), a bias by position, positions that the
#: model makes, a mask that attention makes, a recurrence beside shared attention, convolutions in attention, and
#: positions in the first dim.
CASES = [
    ("llama", "packed", "ring"),
    ("mistral", "packed", "ulysses"),
    ("mistral", "padded left", "ring"),
    ("gemma2", "padded left", "ulysses"),
    ("gemma2", "packed", "ring"),
    ("flint", "packed", "ring"),
    ("bloom", "packed", "ring"),
    ("bart", "packed", "ulysses"),
    ("bart", "padded", "ring"),
    ("roberta", "packed", "ring"),
    ("opt", "padded", "ring"),
    ("doge", "padded", "ring"),
    ("qwen3_next", "packed", "ring"),
    ("mamba", "padded", "ring"),
    ("gpt_neo", "packed", "ring"),
    ("zaya", "packed", "ring"),
    ("xlnet", "plain", "ring"),
]
#: Types that cannot train on text alone here, or whose blocks stand outside of the plan.
REFUSED = (
    *("cpmant", "git", "inkling2_loop_text", "inkling2_text", "phi4_multimodal"),
    *("prophetnet", "reformer", "xlm"),
)
#: Types that keep no packed documents apart, also in one process.
PADDED = ("deepseek_v4", "roformer", "xlnet", "zamba2")


def parts_of(name: str, gather: Any = "auto") -> Any:
    task: Any = CausalLM(config=tiny(name)).on_meta()
    return find_parts(task.model, outermost(task.model), task.parallel_plan(), gather)


def check(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        wrong = {case: value for case, value in of_rank.items() if isinstance(value, str) or value > 2e-5}
        assert not wrong


def _compared_and_inspected(rank: int, ranks: int) -> Any:
    return compare(rank, ranks, CASES), inspect_sequence(rank, ranks)


def test_outputs_and_gradients_are_one_process_s_and_full_sequences_are_sent_once() -> None:
    found = run_distributed(_compared_and_inspected, 2)
    check([compared for compared, _ in found])
    for _, (elements, is_local) in found:
        hidden = 2 * 8 * 32 * 4  # rows, positions of the rank, width, layers
        assert elements["all_gather"] == 2 * (hidden + 2 * 8)  # and the tokens
        assert elements["reduce_scatter"] == 2 * hidden
        assert is_local, "generation needs no full sequences"


@pytest.mark.slow
def test_every_type() -> None:
    types = [name for name in TYPES if name not in REFUSED]
    cases = [(name, "padded" if name in PADDED else "packed", "ring") for name in types if name != "xlnet"]
    check(run_distributed(compare, 2, cases))


def build(name: str) -> tuple[Any, Any]:
    config = {**tiny(name, dropout=False), "vocab_size": VOCABULARY}
    return CausalLM(config=config, lr=1e-3, optimizer_args={"eps": 1e-4}), Tokens(1, rows=8)


def on_pair(**axes: Any) -> MeshStrategy:
    more = {"micro_batches": 4} if "pp" in axes else {}
    return MeshStrategy(**{"dp_shard": 1, "cp": 2, **axes, **more})


def recomputed(mode: Any) -> MeshStrategy:
    return on_pair(dp_shard=2, appliers=[ActivationCheckpoint(mode)])


@pytest.mark.slow
def test_pairs_of_axes_and_recomputation() -> None:
    ways = [partial(on_pair, **{axis: 2}) for axis in ("dp_shard", "pp", "tp")]
    ways += [partial(recomputed, mode) for mode in ("full", "selective")]
    # Slices of attention of gpt_oss have other gradients of experts' biases, and tp refuses them.
    names = [(name, way) for name in ("bloom", "qwen3_next", "opt", "gpt_oss") for way in ways]
    cases = [Case(way, {"name": name}) for name, way in names if (name, way) != ("gpt_oss", ways[2])]
    assert_parity(build, cases, world_size=4, steps=3)


def test_only_what_cannot_be_shared_is_gathered() -> None:
    found = parts_of("qwen3_next")
    assert [name.rpartition(".")[2] for name in found.attention] == ["self_attn"] * len(found.attention)
    assert {name.rpartition(".")[2] for name in found.gathered} == {"linear_attn"}
    assert found.attention
    llama = parts_of("llama")
    assert not llama.gathered
    assert not llama.needs_full_inputs
    assert not parts_of("llama", "all").attention
    assert parts_of("bloom").needs_full_inputs


def test_models_without_blocks_and_unknown_ways_are_refused() -> None:
    task: Any = CausalLM(config=tiny("llama")).on_meta()
    with pytest.raises(DloError, match="got none from LlamaForCausalLM"):
        ContextParallel().check(task.model, ParallelPlan(), 2)
    with pytest.raises(DloError, match="gather must be one of auto, all, got some"):
        ContextParallel(gather="some")  # type: ignore[arg-type]
