import contextlib
import json
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework import costs
from dlo_framework.costs import FlopCounter
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.monitor import RunMonitor, StepClock, optimizer_scalars
from support.monitored import Net, fit
from support.python_calls import count_python_calls
from support.trainers import quiet_trainer


def events(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_what_is_logged_is_what_happened(tmp_path):
    module, _ = fit(tmp_path, accumulate_grad_batches=2)
    found = events(tmp_path)
    losses = [event.value for event in found.Scalars("train/loss")]
    steps = [event.step for event in found.Scalars("train/loss")]
    assert steps == [5, 10, 15, 20]
    means = [sum(module.losses[begin : begin + 10]) / 10 for begin in range(0, 40, 10)]
    assert losses == pytest.approx(means, rel=1e-5)
    norms = [event.value for event in found.Scalars("train/grad_norm")]
    assert norms == pytest.approx([module.norms[step - 1] for step in steps], rel=1e-5)
    assert [event.value for event in found.Scalars("optim/lr")] == pytest.approx([0.01] * 4)
    assert [event.value for event in found.Scalars("optim/momentum")] == pytest.approx([0.8] * 4)
    tags = set(found.Tags()["scalars"])
    speeds = {f"speed/{name}" for name in ("samples_per_s", "data_wait", "step_ms", "tflops")}
    assert tags >= speeds | {"memory/peak_gb"}
    assert all(0 <= event.value < 1 for event in found.Scalars("speed/data_wait"))
    assert "config/text_summary" in found.Tags()["tensors"]


def counted(run, device="cuda"):
    """Returns the FLOPs that are counted in a function of fake tensors on a device, and whether a formula refused."""
    with FakeTensorMode(), torch.device(device), costs.OperatorCounter() as mode:
        run()
    return mode.get_total_flops(), mode.refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [torch.nn.SiLU(), torch.nn.Mish(), torch.nn.BatchNorm1d(8), torch.nn.LSTM(8, 8)])
def test_a_step_that_is_counted_equals_one_that_is_not_to_the_bit(dtype, part):
    """SiLU's and Mish's backward have a decomposition beside their kernel."""
    found = []
    for counts in (False, True):
        torch.manual_seed(1)
        module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), part).to(dtype), torch.randn(64, 8)
        counter = FlopCounter()
        counter.count_first()
        if counts:
            counter.start(module, ((8,),))
        out = module(x.to(dtype))
        (out if isinstance(out, torch.Tensor) else out[0]).float().pow(2).sum().backward()
        counter.stop(64)
        assert (counter.per_sample >= 2 * 2 * 8 * 8) == counts
        found.append([parameter.grad.clone() for parameter in module.parameters()])
        module.zero_grad()
    assert all(map(torch.equal, *found))


def test_flops_of_attention_count_each_head_of_queries_where_heads_share_keys():
    def attend(groups=2, width=16):
        q, k, v = torch.empty(3, 8, 10, 16), torch.empty(3, groups, 12, 16), torch.empty(3, groups, 12, width)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
        state = (torch.empty(n, dtype=torch.uint64) for n in (2, 0))
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, None, None, 10, 12, 0.0, False, *state
        )

    forward = 2 * 3 * 8 * 10 * 12 * (16 + 16)
    assert counted(attend) == (forward + forward * 5 // 2, False)


def test_flops_of_products_with_a_dtype_for_their_result():
    def multiply():
        a, b = torch.empty(3, 4, dtype=torch.bfloat16), torch.empty(4, 5, dtype=torch.bfloat16)
        total, batches = torch.empty(3, 5), (a.expand(2, 3, 4), b.expand(2, 4, 5))
        torch.mm(a, b, out_dtype=torch.float32)
        torch.bmm(*batches, out_dtype=torch.float32)
        with contextlib.suppress(TypeError):  # The shapes of torch 2.11 for this overload; it is counted before.
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)

    assert counted(multiply)[1] is False
    for batch in ((), (2,)):
        shapes = (torch.Size((*batch, 3, 5)), torch.Size((*batch, 3, 4)), torch.Size((*batch, 4, 5)))
        assert costs.added_product_flops(*shapes, torch.float32) == 2 * 3 * 4 * 5 * (2 if batch else 1)


def test_flops_of_packed_attention_are_those_within_documents():
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    q, k = torch.empty(10, 8, 16), torch.empty(10, 2, 16)
    forward = 2 * (3 * 3 + 7 * 7) * 8 * (16 + 16)
    assert costs.packed_attention_flops(q, k, k, ends, ends) == forward
    assert costs.packed_attention_backward_flops(q, q, k, k, q, q, ends, ends) == forward * 5 // 2


def test_a_formula_that_refuses_ends_the_count_and_not_the_step(monkeypatch, caplog):
    def refuse(*_, **__):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setattr(costs, "_formulas", lambda: {torch.ops.aten.mm: refuse, torch.ops.aten.addmm: refuse})
    counter = FlopCounter()
    counter.count_first()
    counter.start(torch.nn.Linear(2, 2), ((2,),))
    assert torch.ones(3, 2).mm(torch.ones(2, 2)).sum() == 12
    counter.stop(3)
    assert counter.per_sample == 0
    assert "the FLOPs of aten.mm are not known" in caplog.text


class Sized(Net):
    """Takes samples of any number of rows [R, 8], of which each epoch has its own; fails in one batch if told to."""

    rows = (3, 5, 3)

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.fail_at = fail_at

    def train_dataloader(self):
        data = torch.randn(8, self.rows[self.trainer.current_epoch], 8)
        return DataLoader(TensorDataset(data), batch_size=4)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(self.losses) == self.fail_at:
            raise RuntimeError("boom")
        return loss


def fit_sized(monitor, module, *callbacks, ckpt_path=None, **options):
    options = {"max_epochs": 3, "log_every_n_steps": 3, **options}
    options |= {"enable_checkpointing": bool(callbacks), "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=[monitor, *callbacks], **options).fit(module, ckpt_path=ckpt_path)


def test_flops_are_counted_once_for_each_shape_and_a_window_has_those_of_its_batches(monkeypatch):
    counted, windows = [], []
    start, total = FlopCounter.start, FlopCounter.total

    def started(counter, module, shape):
        start(counter, module, shape)
        counted.append((len(module.losses), shape, counter.running))

    def summed(counter, samples):
        windows.append((dict(samples), total(counter, samples)))
        return windows[-1][1]

    monkeypatch.setattr(FlopCounter, "start", started)
    monkeypatch.setattr(FlopCounter, "total", summed)
    monitor = RunMonitor()
    fit_sized(monitor, Sized())
    three, five = ((3, 8),), ((5, 8),)
    # The run's second batch, and the first of the other shape; none in the third epoch, whose shape is known.
    assert counted == [(0, three, False), (1, three, True), (2, five, True)]
    a_row = 2 * 2 * 8 * 4
    assert monitor.flops.counts == {three: 3 * a_row, five: 5 * a_row}
    assert windows == [
        ({three: 8, five: 4}, (8 * 3 + 4 * 5) * a_row),
        ({five: 4, three: 8}, (8 * 3 + 4 * 5) * a_row),
    ]


def test_a_resumed_run_takes_the_counts_and_the_open_window_over(tmp_path):
    whole, resumed = RunMonitor(), RunMonitor()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit_sized(whole, Sized(), keep, log_every_n_steps=50)
    path = tmp_path / "step=3.ckpt"
    resumed.load_state_dict(torch.load(path, weights_only=True)["callbacks"]["RunMonitor"])
    assert resumed.flops.counts == whole.flops.counts
    assert resumed._window_shapes == {((3, 8),): 8, ((5, 8),): 4}


def test_samples_of_an_open_window_are_those_of_the_ranks_that_saw_them(tmp_path, monkeypatch):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    monkeypatch.setattr("dlo_framework.watch.monitor.data_parallel_size", lambda trainer: 2)
    fit_sized(RunMonitor(), Sized(), keep, max_epochs=2, log_every_n_steps=50)
    monkeypatch.undo()
    resumed = RunMonitor()
    fit_sized(resumed, Sized(), keep, ckpt_path=tmp_path / "step=3.ckpt", log_every_n_steps=50)
    assert resumed.samples == 3 * 4 * 2 + 3 * 4


def test_a_count_that_an_exception_cuts_ends_there_and_the_next_fit_counts_anew():
    monitor = RunMonitor()
    with pytest.raises(RuntimeError, match="boom"):
        fit_sized(monitor, Sized(fail_at=2))
    assert not monitor.flops.running
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0
    assert monitor.samples == 0
    fit_sized(monitor, Sized())
    assert len(monitor.flops.counts) == 2
    assert monitor.samples == 3 * 8


def test_the_summary_counts_every_sample_and_says_how_it_ended(tmp_path):
    _, trainer = fit(tmp_path, batches=7, max_epochs=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 7 * 4 * 3
    assert summary["steps"] == trainer.global_step == 21
    assert summary["epochs"] == 3
    assert summary["status"] == "finished"
    assert summary["world_size"] == 1
    assert summary["best_checkpoint"].startswith("checkpoints/epoch="), "by the val_loss that it logs"
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 21
    assert summary["metrics"]["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert summary["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_groups_that_differ_get_a_curve_each():
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}], lr=1, momentum=0.9)
    trainer = type("Trainer", (), {"optimizers": [optimizer]})
    assert optimizer_scalars(trainer) == {"optim/lr/0": 0.1, "optim/lr/1": 0.2, "optim/momentum": 0.9}


def python_calls_a_step(folder, full: bool) -> float:
    """Returns the Python function calls of one training step, by counting two runs and taking the difference."""
    counts = []
    for batches in (2, 50, 100):  # The first run imports what a run needs.
        module = Net()
        options = {}
        if full:
            options = {"callbacks": add_default_callbacks([], run_folder=folder, model=module, config="{}")}
            options |= {"logger": TensorBoardLogger(folder, name="", version=""), "profiler": StepClock()}
            options |= {"enable_checkpointing": True, "enable_progress_bar": True}
        trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, **options)
        data = DataLoader(TensorDataset(torch.randn(batches * 4, 8)), batch_size=4)
        counts.append(count_python_calls(partial(trainer.fit, module, data)))
    return (counts[2] - counts[1]) / 50


def test_everything_on_calls_little_more_python_than_plain_lightning(tmp_path):
    """Counts are steady where times are not. What is on by default adds about half to Lightning's own."""
    plain, full = python_calls_a_step(tmp_path, full=False), python_calls_a_step(tmp_path, full=True)
    assert full < 1.55 * plain, f"{full:.0f} Python calls a step with everything on, {plain:.0f} plain"


class Two(Net):
    """Two optimizers stepped by hand, and a loss of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def on_before_optimizer_step(self, optimizer):
        pass

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            loss = net(x).square().mean(dim=1)
            optimizer.zero_grad()
            self.manual_backward(loss.mean())
            optimizer.step()
        self.losses.append(loss.mean().item())
        return loss.detach()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), 0.01) for net in (self.net, self.other)]


@pytest.mark.parametrize("every", [4, 5])
def test_several_optimizers_by_hand_fill_windows_too(tmp_path, every):
    module, _ = fit(tmp_path, Two(), max_epochs=1, log_every_n_steps=every)
    found = events(tmp_path)
    steps = [event.step for event in found.Scalars("train/loss")]
    # Twenty batches of two steps: the first batch whose steps reach a multiple of `every` ends a window.
    assert steps == [end + end % 2 for end in range(every, 41, every)]
    assert [event.step for event in found.Scalars("train/grad_norm")] == steps
    first = module.losses[: steps[0] // 2]
    assert found.Scalars("train/loss")[0].value == pytest.approx(sum(first) / len(first), rel=1e-5)
