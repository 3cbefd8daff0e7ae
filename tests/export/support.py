"""Tiny models with an optimizer whose masters differ from what BF16 weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from layout.tiny import fresh
from muonloom import Muon, parameter_groups
from muonloom.layout import Layout


def model_of(model_type: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """A model in evaluation mode whose FP32 parts (`_keep_in_fp32_modules_strict`) are BF16 too."""
    return fresh(model_type, **changes).to(dtype)


def optimizer_of(model: nn.Module, **options: Any) -> Muon:
    groups = parameter_groups(model, Layout.from_model(model))
    return Muon(groups, **{"lr": 1e-2, "adamw_lr": 1e-3, "placement": "host", **options})


def step(model: nn.Module, optimizer: Muon, seed: int = 0) -> None:
    """Take one step on random gradients, and drain."""
    draw = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=draw).to(param.dtype)
    optimizer.step()
    optimizer.drain()


def trained(model_type: str, **options: Any) -> tuple[nn.Module, Muon]:
    """A model and its optimizer after two steps."""
    model = model_of(model_type)
    optimizer = optimizer_of(model, **options)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def saved(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What `save_pretrained` writes."""
    model.save_pretrained(folder)  # type: ignore[operator]
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


class PeakBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of tensors made inside that are alive at once; views and older tensors are free."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and tensor.device.type != "meta":
                reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
                self._known[storage._cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
        return sum(nbytes for _, nbytes in self._known.values())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
