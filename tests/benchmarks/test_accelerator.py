"""benchmarks/accelerator.py, all of it, at a tiny size on a CPU: that it runs, and counts and compares what it says."""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_plugins.parallel.context.block_attention import CPU_FLASH

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def accelerator(*words: str) -> dict:
    """Returns the record that the script prints."""
    command = [sys.executable, str(BENCHMARKS / "accelerator.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_so(load, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accelerator.py"])
    load("accelerator").main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["tables"] == []
    assert record["not_measured"] == [{"what": "all of it", "why": "this machine has no accelerator"}]


def test_checkpoints_are_saved_and_read_back_by_all(load, tmp_path):
    """What each loads is compared with what was saved, in the code that is timed."""
    tables = load("on_accelerator.checkpoints").checkpoint_tables(torch.device("cpu"), 600_000, 1, tmp_path)
    saving, loading = (table.as_dict() for table in tables)
    assert list(saving["rows"]) == ["torch.save", "torch.save again", "torch DCP", "dlo", "dlo, in the background"]
    assert list(loading["rows"]) == ["torch.load", "torch.load again", "torch DCP", "dlo", "dlo, not checked"]
    assert all(row["GB a second"] > 0 for table in (saving, loading) for row in table["rows"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_reads_something_else_is_found(load):
    checkpoints, rounds = load("on_accelerator.checkpoints"), load("measuring.rounds")
    tensors, targets = ({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    right = checkpoints.timed_load(lambda: targets["w"].fill_(1), tensors, targets, rounds.ELAPSED)
    assert right() >= 0
    wrong = checkpoints.timed_load(lambda: targets["w"][:2].fill_(1), tensors, targets, rounds.ELAPSED)
    with pytest.raises(AssertionError):
        wrong()


@pytest.mark.slow
def test_the_first_of_eight_ranks_is_measured_without_the_others(load):
    table = load("on_accelerator.simulated").simulated_table("tiny", torch.device("cpu"), 1).as_dict()
    rows = table["rows"]
    strategies = ["dlo fsdp", "dlo zero1", "dlo zero2", "dlo zero3"]
    assert list(rows) == ["loop, no strategy", "loop, no strategy again", "FSDP2", *strategies]
    calls = {name: row["Python calls a step"] for name, row in rows.items()}
    assert all(calls[name] > calls["loop, no strategy"] for name in strategies)
    assert all(calls[name] < calls["FSDP2"] for name in strategies)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_one_device_trains_by_hand_and_by_dlo_compiled_and_not():
    words = ["--device", "cpu", "--size", "tiny", "--rounds", "1", "--backend", "aot_eager", "--parts", "vit", "llm"]
    vit, llama = accelerator(*words)["tables"]
    for table, item, more in ((vit, "images", []), (llama, "tokens", ["loop, compiled by block"])):
        assert list(table["rows"]) == ["loop", "loop again", "loop, compiled", *more, "dlo fit", "dlo fit, compiled"]
        for row in table["rows"].values():
            assert row[f"{item} a second"] > 0
            assert row["TFLOP/s"] > 0
    # A ViT of width 32 and depth 2, 17 tokens: 2 * 3 * parameters * tokens, and attention; four images.
    gigaflops = float(vit["notes"][0].split()[0])
    blocks = 2 * (12 * 32**2) * 17 + 3 * 64 * 32 * 16 + 32 * 1000
    assert gigaflops == pytest.approx(6 * blocks * 4 / 1e9, rel=0.1)


def test_timms_step_and_dlos_train_the_same_model(load):
    """The same loss and gradients of the same weights and batch."""
    images, subjects = load("on_accelerator.images"), load("on_accelerator.subjects")
    for part, model in images.MODELS.items():
        args = {} if model.channels_last else images._TINY_VIT
        subject = images.image_subject(images.Model(model.name, 4, args, model.channels_last), 32, fused=False)
        net, task = subject.net(), subject.task()
        task.configure_model()
        task.model.load_state_dict(net.trainable_module.state_dict())
        net.train(), task.train()
        batch = subject.batch()
        loss = subject.loss(net, batch)
        torch.testing.assert_close(loss, task.loss(task(batch[0]), batch), msg=part)
        decayed = [len(group["params"]) for group in images.timms_optimizer(net).param_groups if group["weight_decay"]]
        assert decayed == [len([1 for p in net.parameters() if p.ndim > 1])] or not model.channels_last
    assert subjects.CLASSES == 1000


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel: those that make or write a tensor, views and empty memory aside."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not views and "empty" not in func.name() and func._schema.returns:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class CountsStep(Callback):
    """Counts the launches of one step."""

    def __init__(self, step):
        self.step, self.launches = step, Launches()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.step:
            self.launches.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.step:
            self.launches.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_step_of_dlo_casts_no_more_than_a_loop_and_launches_few_kernels_more(name, load):
    """More: the loss in chunks, sums for what is logged, and a look for NaN, which do not grow with a model."""
    subjects, training = load("on_accelerator.subjects"), load("on_accelerator.training")
    subject, cpu = getattr(subjects, name)(subjects.SIZES["tiny"], True), torch.device("cpu")
    work = training.Work(cpu, load("measuring.rounds").ELAPSED, [subject.batch()], 5, 3)
    ours = CountsStep(6)
    training.by_dlo(subject, subjects.draw_weights_on(cpu, subject.task()), work, [ours])
    loop, net = Launches(), subjects.build_network(cpu, subject.net)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for mode in (contextlib.nullcontext(), loop):
        optimizer.zero_grad()
        with mode:
            with torch.autocast("cpu", torch.bfloat16):
                loss = subject.loss(net, work.batches[0])
            loss.backward()
            optimizer.step()
    found, expected = ours.launches.counts, loop.counts
    assert found["aten::_to_copy"] <= expected["aten::_to_copy"]
    assert found.total() <= expected.total() + 60, found - expected


def test_kernels_of_the_ring_are_timed_and_agree(load):
    ring = load("on_accelerator.ring")
    causal, full, merge = ring.ring_tables("tiny", torch.device("cpu"), 1, "aot_eager")
    for table in (causal, full):
        assert list(table.rows) == ["sdpa", "sdpa again", "dlo CpuFlash", "dlo written out"]
    assert list(merge.rows) == ["copy_", "copy_ again", "dlo", "dlo, compiled"]
    q, k, v, grad = (torch.randn(1, 2, 8, 8) for _ in range(4))
    for is_causal in (False, True):
        expected = ring._sdpa(q, k, v, grad, is_causal)
        for found in (
            ring._fused(CPU_FLASH, q, k, v, grad, is_causal),
            ring._written(q, k, v, grad, is_causal),
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_all_other_parts_run_on_a_cpu():
    parts = ["qwen_lora", "llama_full", "loss", "vit_s", "resnet18", "strategies", "batch_mix"]
    words = ["--device", "cpu", "--size", "tiny", "--rounds", "1", "--backend", "aot_eager", "--parts", *parts]
    rows = [row for table in accelerator(*words)["tables"] for row in table["rows"].items()]
    assert {"dlo fit, compiled", "timm, compiled", "plain again", "dlo zero3", "FSDP2", "timm CutMix batch"} <= {
        name for name, _ in rows
    }
    assert all(value > 0 for _, row in rows for name, value in row.items() if name.endswith(" a second"))
