"""What the optimizer's tests share: seeded parameters, fingerprints, and the exact setting."""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SEEDS = (0, 1)

# FP32 compute shows every FP32 error above 1e-6 of the largest weight: a lost decay of
# lr·wd = 1e-5 is an error ten times that.
EXACT: dict[str, Any] = {"ns_method": "standard", "ns_compute_dtype": torch.float32}
TORCH_LIKE: dict[str, Any] = {"ns_method": "standard", "ns_compute_dtype": torch.bfloat16}

Named = list[tuple[str, nn.Parameter]]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(randn(*shape, seed=seed, dtype=dtype))


def model_parameters(seed: int = 0, dtype: torch.dtype = torch.float32, depth: int = 2) -> Named:
    """Named parameters of a small decoder: matrices of two shapes, a stack, and scalar ones."""
    named: Named = [("embed_tokens.weight", parameter(11, 8, seed=seed, dtype=dtype))]
    for i in range(depth):
        shapes = {
            "mlp.up_proj.weight": (16, 8),
            "mlp.down_proj.weight": (8, 16),
            "norm.weight": (8,),
            "mlp.up_proj.bias": (16,),
        }
        for j, (name, shape) in enumerate(shapes.items()):
            seed_here = seed * 1000 + 10 * i + j + 1
            named.append((f"layers.{i}.{name}", parameter(*shape, seed=seed_here, dtype=dtype)))
    named.append(("lm_head.weight", parameter(11, 8, seed=seed + 7, dtype=dtype)))
    return named


def give_gradients(params: Iterable[Tensor], seed: int, size: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = (randn(*p.shape, seed=7919 * seed + i) * size).to(p.dtype)


def tensors_of(named: Named) -> list[nn.Parameter]:
    return [p for _, p in named]


def bits(t: Tensor) -> bytes:
    flat = t.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def fingerprint(opt: torch.optim.Optimizer) -> str:
    """SHA-256 of every weight and every state tensor of an optimizer."""
    digest = hashlib.sha256()
    for group in opt.param_groups:
        for p in group["params"]:
            digest.update(bits(p))
            for key, value in sorted(opt.state.get(p, {}).items()):
                digest.update(key.encode())
                digest.update(bits(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def weights_fingerprint(params: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for p in params:
        digest.update(bits(p))
    return digest.hexdigest()


def group_of(opt: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    (found,) = [g for g in opt.param_groups if any(q is p for q in g["params"])]
    return found


def algorithms(opt: torch.optim.Optimizer, named: Named) -> dict[str, str]:
    return {name: group_of(opt, p)["algorithm"] for name, p in named}


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def assert_weight(actual: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """Absolute, in units of the largest wanted weight (FP32 rounding of W, of X and of lr·X)."""
    unit = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    error = float((actual.detach().double() - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * unit, f"error {error:.3e} for weights up to {unit:.3e}"


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def zeros_like_state(p: Tensor) -> Tensor:
    return torch.zeros(p.shape, dtype=torch.float64)


class Said:
    """Text of warnings and of log records at WARNING and above."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def about(self, *words: str) -> list[str]:
        return [line for line in self.lines if all(word in line for word in words)]


class _Collect(logging.Handler):
    def __init__(self, said: Said) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Said]:
    """Collect what is warned, by ``warnings`` or by ``logging``, instead of raising it."""
    said, logger = Said(), logging.getLogger("muonloom")
    handler = _Collect(said)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said.lines += [str(w.message) for w in caught]
    finally:
        logger.removeHandler(handler)


def steps(
    opt: torch.optim.Optimizer,
    params: Sequence[Tensor],
    seeds: Iterable[int],
    before: Callable[[int], None] | None = None,
) -> None:
    for seed in seeds:
        give_gradients(params, seed)
        if before is not None:
            before(seed)
        opt.step()


# One rate for both algorithms, so that no warning asks for AdamW's.
QUIET: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}


def mixed(prefix: str = "layers.0") -> Named:
    return [
        (f"{prefix}.mlp.up_proj.weight", parameter(16, 8)),
        (f"{prefix}.norm.weight", parameter(8)),
    ]
