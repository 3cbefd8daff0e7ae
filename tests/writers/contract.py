"""What every writer must do, whatever it writes; a test class for each writer inherits this."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from muonloom.writers import Writer

GUARD = 3  # elements around each tensor given to a writer


@dataclass(frozen=True, kw_only=True)
class Case:
    """A writer and a parameter for it.

    Attributes:
        make: the writer, prepared or not, for this parameter.
        shape: of the parameter.
        dtype: of the parameter.
        released: whether the parameter may lose its storage.
    """

    make: Callable[[Parameter], Any]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    released: bool = True

    def parameter(self, seed: int = 0) -> Parameter:
        return Parameter(self.master(seed).to(self.dtype))

    def master(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape, generator=draw) * torch.randn((), generator=draw).exp()


def prepared(case: Case) -> tuple[Parameter, Any]:
    """Return a parameter and its writer, as after registration; without storage where that is allowed."""
    param = case.parameter()
    writer = case.make(param)
    writer.prepare(param)
    if case.released:
        param.untyped_storage().resize_(0)
    return param, writer


def atoms(writer: Any, param: Tensor) -> list[slice]:
    """Return the smallest ranges of dimension 0 that may be written alone; whole matrices of stacks."""
    length = param.shape[0] if param.ndim else 1
    step = writer.rows_per_block(param)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def snapshot(writer: Any) -> list[bytes]:
    return [
        bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())
        for tensor in writer.tensors()
    ]


def part(master: Tensor, rows: slice) -> Tensor:
    return master.reshape(1) if master.ndim == 0 else master[rows].contiguous()


@torch.no_grad()
def write_all(writer: Any, param: Parameter, master: Tensor) -> None:
    whole = slice(0, param.shape[0] if param.ndim else 1)
    writer.write(param, part(master, whole), whole)


class WriterContract:
    """Inherit, and parametrize over `case`."""

    def test_it_is_a_writer(self, case: Case) -> None:
        assert isinstance(case.make(case.parameter()), Writer)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_atoms_in_any_order_give_the_bytes_of_one_write(self, case: Case, seed: int) -> None:
        (param, writer), (other_param, other) = prepared(case), prepared(case)
        master = case.master(seed + 1)
        write_all(writer, param, master)
        ranges = atoms(other, other_param)
        random.Random(seed).shuffle(ranges)
        with torch.no_grad():
            for rows in ranges:
                other.write(other_param, part(master, rows), rows)
        assert snapshot(other) == snapshot(writer)

    def test_it_reads_what_it_wrote(self, case: Case) -> None:
        param, writer = prepared(case)
        master = case.master(1)
        write_all(writer, param, master)
        read = writer.read(param)
        assert (read.dtype, read.shape) == (torch.float32, param.shape)
        assert not read.requires_grad
        if master.numel():
            assert float((read - master).norm() / master.norm()) < 0.04
        # What was read, written again, reads the same.
        write_all(writer, param, read)
        assert torch.equal(writer.read(param), read)

    def test_reading_hands_out_a_copy(self, case: Case) -> None:
        param, writer = prepared(case)
        before = snapshot(writer)
        writer.read(param).fill_(7)
        assert snapshot(writer) == before

    def test_other_rows_stay(self, case: Case) -> None:
        param, writer = prepared(case)
        for rows in atoms(writer, param):
            before = writer.read(param)
            master = case.master(2)
            with torch.no_grad():
                writer.write(param, part(master, rows), rows)
            after, outside = writer.read(param), torch.ones(param.shape, dtype=torch.bool)
            if param.ndim:
                outside[rows] = False
                assert torch.equal(after[outside], before[outside])
                assert master[rows].numel() == 0 or not torch.equal(after[rows], before[rows])

    def test_identity_is_stable(self, case: Case) -> None:
        param, writer = prepared(case)
        storage, places = writer.storage, [tensor.data_ptr() for tensor in writer.tensors()]
        for seed in (1, 2):
            write_all(writer, param, case.master(seed))
        assert writer.storage is storage
        assert [tensor.data_ptr() for tensor in writer.tensors()] == places

    def test_its_tensors_are_what_a_write_changes(self, case: Case) -> None:
        """Each of them changes, with its version; and they alone hold what is read."""
        param, writer = prepared(case)
        before, versions = snapshot(writer), [tensor._version for tensor in writer.tensors()]
        kept = [tensor.detach().clone() for tensor in writer.tensors()]
        weight = writer.read(param)
        write_all(writer, param, case.master(1) * 1e3)
        if param.numel():
            assert all(new != old for new, old in zip(snapshot(writer), before, strict=True))
            assert all(t._version > v for t, v in zip(writer.tensors(), versions, strict=True))
        with torch.no_grad():
            for tensor, old in zip(writer.tensors(), kept, strict=True):
                tensor.copy_(old)
        assert torch.equal(writer.read(param), weight)

    def test_it_agrees_until_one_byte_changes(self, case: Case) -> None:
        param, writer = prepared(case)
        master = case.master(1)
        write_all(writer, param, master)
        assert writer.agrees(param, master) is True
        for tensor in writer.tensors():
            if tensor.numel() == 0:
                continue
            view = tensor.detach().view(-1).view(torch.uint8)
            for place in (0, view.numel() // 2, -1):
                view[place] ^= 1
                assert writer.agrees(param, master) is False
                view[place] ^= 1
        assert writer.agrees(param, master) is True

    def test_the_master_stays(self, case: Case) -> None:
        param, writer = prepared(case)
        master = case.master(1)
        kept = master.clone()
        write_all(writer, param, master)
        writer.agrees(param, master)
        assert torch.equal(master, kept)

    def test_preparing_again_changes_nothing(self, case: Case) -> None:
        param, writer = prepared(case)
        write_all(writer, param, case.master(1))
        before, storage = snapshot(writer), writer.storage
        writer.prepare(param)
        assert snapshot(writer) == before
        assert writer.storage is storage

    def test_the_writer_of_another_parameter_is_refused(self, case: Case) -> None:
        _, writer = prepared(case)
        other = Parameter(torch.ones(*case.shape, 2))
        if not writer.tensors() or writer.tensors()[0].shape == other.shape or not case.released:
            pytest.skip("it writes into whatever parameter it is given")
        with pytest.raises(ValueError, match=r"got .*wanted the parameter's"):
            writer.prepare(other)
