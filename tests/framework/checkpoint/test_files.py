"""Files of a checkpoint: safetensors as other programs read and write it, the tree, the state that is not tensors."""

import hashlib
import io
import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlo_framework.checkpoint import load, save
from dlo_framework.checkpoint.loading import TensorFile
from dlo_framework.checkpoint.manifest import (
    AS_BYTES,
    SAFETENSORS_CODES,
    dtype_name,
    make_header,
    read_header,
)
from dlo_framework.checkpoint.state_tree import extract_tensors, read_mark
from dlo_framework.checkpoint.store import HashedFile
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard, full_box

TYPES = [getattr(torch, name) for name in (*SAFETENSORS_CODES, *AS_BYTES) if name != "float4_e2m1fn_x2"]


def some(dtype: torch.dtype, shape=(3, 5)) -> torch.Tensor:
    """Every bit pattern is preserved, not only numbers."""
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(dtype.itemsize)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_type_is_stored_bit_by_bit(tmp_path, dtype):
    tensors = {"matrix": some(dtype), "scalar": some(dtype, ()), "none": some(dtype, (0, 2)), "strided": some(dtype).T}
    save({"state_dict": tensors}, tmp_path / "a.ckpt")
    run = load(tmp_path / "a.ckpt")
    for name, tensor in tensors.items():
        read = run["state_dict"][name]
        assert (read.dtype, read.shape, bits(read)) == (dtype, tensor.shape, bits(tensor))
        target = torch.zeros(tensor.shape, dtype=torch.uint8).new_empty(tensor.shape, dtype=dtype)
        run["state_dict"].read_into(name, target)
        assert bits(target) == bits(tensor)


def test_other_types_are_refused():
    with pytest.raises(DloError, match=r"cannot store tensors of torch\.quint8; convert it to one of: float64, "):
        dtype_name(torch.quint8)


def test_safetensors_reads_what_is_written_and_the_hash_is_the_files(tmp_path):
    names = [name for name in SAFETENSORS_CODES if name != "complex64"]
    tensors = sorted((some(getattr(torch, name)) for name in names), key=lambda tensor: -tensor.dtype.itemsize)
    head = make_header([(str(n), dtype_name(t.dtype), tuple(t.shape)) for n, t in enumerate(tensors)], {"a": "b"})
    with HashedFile(tmp_path / "x.safetensors") as file:
        file.write(head)
        for tensor in tensors:
            file.write_tensor(tensor, bucket_bytes=7)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert file.bytes == len(content)
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    others = load_file(tmp_path / "x.safetensors")
    for number, tensor in enumerate(tensors):
        assert bits(others[str(number)]) == bits(tensor)
    assert read_header(tmp_path / "x.safetensors")[1] == {"a": "b"}


def test_what_safetensors_writes_is_read_aligned_or_not(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": some(torch.float32), "b": some(torch.int8, (3,))}, path)
    # The odd bytes first, which the format allows and its library does not write.
    header = {"b": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    header["a"] = {"dtype": "F32", "shape": [3, 5], "data_offsets": [3, 63]}
    text = json.dumps(header).encode()
    odd = tmp_path / "odd.safetensors"
    raw = some(torch.int8, (3,)).numpy().tobytes() + some(torch.float32).numpy().tobytes()
    odd.write_bytes(len(text).to_bytes(8, "little") + text + raw)
    for file in (path, odd):
        stored, _ = read_header(file)
        for name, tensor in (("a", some(torch.float32)), ("b", some(torch.int8, (3,)))):
            assert bits(TensorFile(file).tensor(stored[name])) == bits(tensor)
            target, box = torch.empty_like(tensor), full_box(tuple(tensor.shape))
            TensorFile(file).copy_part(stored[name], box, box, target)
            assert bits(target) == bits(tensor)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x05", b"\xff" * 16, (10**6).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
    + [
        len(text).to_bytes(8, "little") + text + b"\0" * 4
        for text in (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
            b'{"a": {"shape": [1]}}',
        )
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DloError, match=r"x\.safetensors|'F99' in a safetensors file"):
        read_header(path)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def get_extra_state(self):
        return {"answer": 42}

    def set_extra_state(self, state):
        self.answer = state["answer"]


def test_what_is_taken_out_and_what_stays(tmp_path):
    module = Module()
    state = module.state_dict()
    average = {name: value + 1 for name, value in state.items() if isinstance(value, torch.Tensor)}
    moments = {"exp_avg": torch.ones(2, 3), "step": torch.tensor(4.0), "blocks": [torch.ones(2), torch.zeros(3)]}
    run = {
        "state_dict": state,
        "average": average,
        "optimizer_states": [{"state": {"linear.weight": moments, "linear.bias": {}}, "param_groups": [{"lr": 1}]}],
        "random_state": [{"torch": torch.get_rng_state()}],
        "callbacks": {"Mine": {"list": [FlatShard(torch.ones(4), torch.Size([4]), 0)], "score": torch.tensor(2.0)}},
        "tuple": (1, torch.ones(2), OrderedDict(a=1)),
    }
    rest, found = extract_tensors(run)
    groups = {place.group for place, _ in found}
    assert groups == {"model", "average", "optimizer.0", "callbacks.Mine.list"}
    assert "linear.weight.blocks.1" in {place.name for place, _ in found}
    assert read_mark(rest["state_dict"]["linear.weight"]) == ("model", "linear.weight")
    assert torch.is_tensor(rest["random_state"][0]["torch"])
    assert torch.is_tensor(rest["callbacks"]["Mine"]["score"])

    save(run, tmp_path / "a.ckpt")
    read = load(tmp_path / "a.ckpt")
    assert list(read) == list(run)
    other = Module()
    assert str(other.load_state_dict(read["state_dict"])) == "<All keys matched successfully>"
    assert other.answer == 42
    assert read["state_dict"]._metadata == {key: dict(value) for key, value in state._metadata.items()}
    assert all(torch.equal(read["average"][name], value) for name, value in average.items())
    assert set(read["average"]) == set(average)
    loaded = read["optimizer_states"][0]["state"]
    assert loaded["linear.bias"] == {}
    assert torch.equal(loaded["linear.weight"]["step"], torch.tensor(4.0))
    assert [t.tolist() for t in loaded["linear.weight"]["blocks"]] == [[1, 1], [0, 0, 0]]
    assert torch.equal(read["random_state"][0]["torch"], run["random_state"][0]["torch"])
    assert read["callbacks"]["Mine"]["list"][0].tolist() == [1.0] * 4
    assert read["tuple"][0] == 1
    assert torch.equal(read["tuple"][1], torch.ones(2))


def test_hyperparameters_that_are_no_plain_data_are_kept_as_text(tmp_path):
    run = {"state_dict": {}, "hyper_parameters": {"width": 3, "stream": io.BytesIO}}
    with pytest.warns(UserWarning, match="the hyperparameter 'stream' is saved as text: a type is not plain data"):
        save(run, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt")["hyper_parameters"] == {"width": 3, "stream": "<class '_io.BytesIO'>"}
    assert run["hyper_parameters"]["stream"] is io.BytesIO
