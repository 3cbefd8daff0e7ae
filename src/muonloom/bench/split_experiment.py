"""Muon Split: train with whole up-projections, blocks of four heads, and single heads; compare.

`python -m muonloom.bench.split_experiment` trains a small GLM-MoE-DSA on the standard library's sources,
once a variant and seed, and writes curves as PNG and tables into a Markdown file between its markers.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import muonloom
from muonloom.bench.machine import describe, num_threads, versions
from muonloom.bench.split_change import measure_changes
from muonloom.bench.split_report import (
    Curves,
    change_table,
    experiment_table,
    flops_table,
    replace_section,
    write_plots,
)
from muonloom.errors import ConfigError
from muonloom.train.config import OptimConfig, TrainConfig
from muonloom.train.config_file import load_config
from muonloom.train.data import Corpus, load_corpus
from muonloom.train.model import build_model
from muonloom.train.optim import build_layout
from muonloom.train.schedule import make_scheduler
from muonloom.train.trainer import Observer, StepRecord, Trainer

HEADS = 8
GAIN_RATIO = 16.0
ATTENTION = "muonloom_largest_logit"
SECTIONS = ("experiment", "change", "flops")

# The eighth triple of this table repeats, and brings every singular value to 1: what is left of a spread
# over heads is the method's, not the polynomial's. 16 steps amplify a small singular value 1e6-fold: a head
# of kv_b_proj needs that, as its keys have gradients that much smaller than its values early in training.
ACCURATE: tuple[Any, int] = ("polar_express_1.01", 16)
DEFAULT: tuple[Any, int] = ((3.4445, -4.7750, 2.0315), 5)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between the runs: the cut, and the polynomial (coefficients, steps)."""

    heads_per_block: int | None
    polynomial: tuple[Any, int] = ACCURATE


VARIANTS: dict[str, Variant] = {
    "whole": Variant(heads_per_block=None),
    "k = 4": Variant(heads_per_block=4),
    "k = 1": Variant(heads_per_block=1),
    "k = 1, default triple": Variant(heads_per_block=1, polynomial=DEFAULT),
}


def experiment_config(path: Path, *, steps: int) -> TrainConfig:
    """Return the default run's config, with more heads, and less text a step so that it takes minutes.

    Raises:
        ConfigError: `path` is no config of a run.
    """
    changes = {
        "model.config.num_attention_heads": HEADS,
        "model.config.num_key_value_heads": HEADS,
        "model.attention": ATTENTION,
        "data.sequence_length": 64,
        "schedule.batch_size": 8,
        "schedule.steps": steps,
        "schedule.warmup_steps": min(20, steps - 1),
        "eval.every": max(1, steps // 5),
    }
    return load_config(path, [f"{key}={value}" for key, value in changes.items()])


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """Return the same run with other weights and batches."""
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


class LogitProbe:
    """Eager attention that remembers the largest logit of the training passes, `q·k·scaling` where seen.

    MLA has as many key heads as query heads, so that no head is repeated.
    """

    def __init__(self) -> None:
        self._largest = -float("inf")

    def install(self) -> None:
        """Make it the attention of models whose attn_implementation is `ATTENTION`."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(ATTENTION, self)
        AttentionMaskInterface.register(ATTENTION, eager_mask)

    def take(self) -> float:
        """Return the largest logit since the last call."""
        largest, self._largest = self._largest, -float("inf")
        return largest

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend: query, key (batch, heads, tokens, head), value (batch, heads, tokens, v); FP32."""
        logits = (query @ key.mT) * scaling + attention_mask
        if module.training:
            self._largest = max(self._largest, float(logits.detach().amax()))
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights


def set_head_gains(model: nn.Module) -> None:
    """Multiply the outputs of the heads of each layer by fixed gains from 1/4 to 4, in front of `o_proj`.

    The gains are part of the model. A head's gradients, which are true gradients of the loss, are then
    about as large as its gain, and stay so while training.
    """
    exponents = torch.linspace(-0.5, 0.5, HEADS)
    for name, module in model.named_modules():
        if name.endswith("self_attn.o_proj"):
            width = module.in_features // HEADS
            gains = (GAIN_RATIO**exponents).repeat_interleave(width)
            module.register_forward_pre_hook(_multiplier(gains))


def _multiplier(gains: Tensor) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    return lambda module, inputs: inputs[0] * gains


class HeadRecorder:
    """Watches an optimizer's steps: how much the heads of `q_b_proj` and `kv_b_proj` differ.

    A spread is the largest ÷ the smallest Frobenius norm over the heads of one parameter, of its update
    (decay taken off) or of its gradient; of a kind, that of the layer where it is largest.
    """

    def __init__(self, model: nn.Module, optimizer: muonloom.Muon) -> None:
        self._weights = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.endswith(("q_b_proj.weight", "kv_b_proj.weight"))
        }
        self._before: dict[str, Tensor] = {}
        self.update_spread: dict[str, list[float]] = {"q_b_proj": [], "kv_b_proj": []}
        self.gradient_spread: dict[str, list[float]] = {"q_b_proj": [], "kv_b_proj": []}
        self._groups = optimizer.param_groups
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._compare)

    def _remember(self, *_: Any) -> None:
        self._before = {name: w.detach().clone() for name, w in self._weights.items()}

    def _compare(self, *_: Any) -> None:
        updates: dict[str, list[float]] = {"q_b_proj": [], "kv_b_proj": []}
        gradients: dict[str, list[float]] = {"q_b_proj": [], "kv_b_proj": []}
        for name, weight in self._weights.items():
            kind = name.split(".")[-2]
            assert weight.grad is not None
            decayed = self._before[name] * (1 - self._decay(weight))
            updates[kind].append(_spread(decayed - weight.detach()))
            gradients[kind].append(_spread(weight.grad))
        for kind in updates:
            self.update_spread[kind].append(max(updates[kind]))
            self.gradient_spread[kind].append(max(gradients[kind]))

    def _decay(self, weight: Tensor) -> float:
        group = next(g for g in self._groups if any(p is weight for p in g["params"]))
        return float(group["lr"]) * float(group["weight_decay"])


def _spread(rows: Tensor) -> float:
    norms = rows.view(HEADS, -1).norm(dim=1)
    return float(norms.max() / norms.min())


def build_split_optimizer(
    model: nn.Module, layout: muonloom.Layout, config: OptimConfig, polynomial: tuple[Any, int]
) -> muonloom.Muon:
    """Return the config's optimizer with another polynomial, in FP32 whatever the machine."""
    coefficients, ns_steps = polynomial
    return muonloom.Muon(
        muonloom.parameter_groups(model, layout, no_decay=tuple(config.no_decay)),
        layout=layout,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn=config.adjust_lr_fn,
        idle_matrices=config.idle_matrices,
        ns_coefficients=coefficients,
        ns_steps=ns_steps,
        ns_compute_dtype=torch.float32,
    )


def train_variant(config: TrainConfig, corpus: Corpus, variant: str) -> Curves:
    """Train one of `VARIANTS`; the seed gives weights and batches, the same for every variant."""
    chosen = VARIANTS[variant]
    device = torch.device("cpu")
    probe = LogitProbe()
    probe.install()
    torch.manual_seed(config.run.seed)
    model = build_model(
        config.model, vocabulary=256, sequence_length=config.data.sequence_length, device=device
    )
    set_head_gains(model)
    optim = config.optim.model_copy(update={"heads_per_block": chosen.heads_per_block})
    optimizer = build_split_optimizer(model, build_layout(model, optim), optim, chosen.polynomial)
    recorder = HeadRecorder(model, optimizer)
    logits: list[float] = []

    def on_step(_: StepRecord) -> None:
        logits.append(probe.take())

    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, config.schedule),
        corpus=corpus,
        config=config,
        device=device,
    )
    history = trainer.run(Observer(on_step=on_step))
    optimizer.drain()
    return Curves(
        variant=variant,
        seed=config.run.seed,
        losses=[record.loss for record in history.steps],
        held_out=[(record.step, record.loss) for record in history.evals],
        update_spread=recorder.update_spread,
        gradient_spread=recorder.gradient_spread,
        largest_logit=logits,
        ns_calls=optimizer.last_step["ns_calls"],
    )


def run_experiment(config: TrainConfig, *, seeds: int) -> list[Curves]:
    """Train every variant with every seed, the variants of a seed one after the other."""
    corpus = load_corpus(config.data)
    curves: list[Curves] = []
    for seed in range(seeds):
        for variant in VARIANTS:
            begin = time.perf_counter()
            curves.append(train_variant(with_seed(config, seed), corpus, variant))
            seconds = time.perf_counter() - begin
            print(f"seed {seed}, {variant}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return curves


def _machine_line(options: argparse.Namespace) -> str:
    facts, found = describe(torch.device("cpu")), versions()
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {facts['cpu']}, {facts['threads']} thread, "
        f"no GPU; torch {found['torch']}, Python {found['python']}; "
        f"`python -m muonloom.bench.split_experiment --steps {options.steps} --seeds {options.seeds}`."
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m muonloom.bench.split_experiment", description=__doc__
    )
    parser.add_argument("--config", type=Path, default=Path("configs/default.toml"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="where PNGs go")
    parser.add_argument("--doc", type=Path, default=Path("docs/muon-split.md"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(argv)
    if options.steps < 2 or options.seeds < 1:
        parser.error("--steps: wanted 2 or more; --seeds: wanted 1 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; write the curves, and the tables into the document."""
    options = _options(argv)
    try:
        _write_sections(options.doc, {})
        config = experiment_config(options.config, steps=options.steps)
    except (OSError, ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with num_threads(1):
        curves = run_experiment(config, seeds=options.seeds)
        changes = measure_changes()
        machine = _machine_line(options)
    options.out.mkdir(parents=True, exist_ok=True)
    write_plots(options.out, curves)
    sections = {
        "experiment": [
            f"{machine} Learning rate {config.optim.lr}.",
            "",
            *experiment_table(curves),
        ],
        "change": [machine, "", *change_table(changes)],
        "flops": flops_table(),
    }
    print("\n".join(line for lines in sections.values() for line in lines), flush=True)
    _write_sections(options.doc, sections)
    return 0


def _write_sections(path: Path, sections: Mapping[str, Sequence[str]]) -> None:
    """Check that `path` has the markers of all sections; write those that are given."""
    text = path.read_text(encoding="utf-8")
    for section in SECTIONS:
        replaced = replace_section(text, section, sections.get(section, []))
        text = replaced if section in sections else text
    if sections:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
