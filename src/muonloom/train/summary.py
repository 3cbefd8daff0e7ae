"""What a run came to, as plain data: the content of `summary.json` and of the last screen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

import muonloom
from muonloom.train.config import TrainConfig
from muonloom.train.data import Corpus
from muonloom.train.machine import Machine
from muonloom.train.model import class_name
from muonloom.train.proofs import ProofRecord
from muonloom.train.sample import Completion
from muonloom.train.team import Team
from muonloom.train.trainer import History

FORMAT = 1  # of summary.json; raised when a key changes its meaning or goes


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """All parameters of one kind: those whose names differ in layer or expert numbers alone."""

    kind: str
    algorithm: str
    parameters: int
    elements: int
    matrices: int
    shapes: list[list[int]]  # logical (out, in), each once
    updated: bool  # whether any of them ever had a gradient
    reason: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run measured. Losses are nats a byte."""

    before: float
    after: float
    evaluated_bytes: float
    baselines: Mapping[str, float]
    completion: Completion | None
    last_step: Mapping[str, Any]  # Muon.last_step of the last training step
    memory: Mapping[str, int]  # Muon.memory() in the middle of a step
    proofs: list[ProofRecord]
    seconds: Mapping[str, float]  # by phase
    interrupted: bool
    resumed_from: int | None  # the step after which this process went on


def kind_rows(model: nn.Module, layout: muonloom.Layout, optimizer: muonloom.Muon) -> list[KindRow]:
    """Return the layout by kind, in the model's order."""
    members: dict[tuple[str, str], list[tuple[Any, int, bool]]] = {}
    for name, parameter in model.named_parameters():
        rule = layout[name]
        member = (rule, parameter.numel(), bool(optimizer.state.get(parameter)))
        members.setdefault((rule.kind, rule.algorithm), []).append(member)
    rows = []
    for (kind, algorithm), items in members.items():
        shapes = {tuple(shape) for rule, _, _ in items for shape in rule.matrices}
        is_muon = algorithm == "muon"
        rows.append(
            KindRow(
                kind=kind,
                algorithm=algorithm,
                parameters=len(items),
                elements=sum(numel for _, numel, _ in items),
                matrices=sum(len(rule.matrices) for rule, _, _ in items) if is_muon else 0,
                shapes=[list(shape) for shape in sorted(shapes)] if is_muon else [],
                updated=any(updated for _, _, updated in items),
                reason=items[0][0].reason,
            )
        )
    return rows


def optimizer_share(history: History) -> float | None:
    """Return the optimizer's part of a step's wall time: the median over steps after the first."""
    shares = [record.optimizer_seconds / record.seconds for record in history.steps[1:]]
    return statistics.median(shares) if shares else None


def summarize(
    *,
    config: TrainConfig,
    machine: Machine,
    corpus: Corpus,
    model: nn.Module,
    layout: muonloom.Layout,
    optimizer: muonloom.Muon,
    history: History,
    measured: Measured,
    team: Team,
) -> dict[str, Any]:
    """Return all of it as plain values (`json.dumps` works where numbers are finite).

    On several ranks, what is of one rank (`memory`, `last_step`, `machine`) is of this one.
    """
    return {
        "format": FORMAT,
        "name": config.run.name,
        "interrupted": measured.interrupted,
        "resumed_from": measured.resumed_from,
        "machine": asdict(machine),
        "parallel": {"mode": team.mode, "ranks": team.size},
        "model": _model_summary(model),
        "data": _data_summary(config, corpus),
        "training": _training_summary(history),
        "loss": _loss_summary(history, measured, corpus),
        "completion": None if measured.completion is None else asdict(measured.completion),
        "layout": [asdict(row) for row in kind_rows(model, layout, optimizer)],
        "last_step": dict(measured.last_step),
        "memory": dict(measured.memory),
        "proofs": [asdict(proof) for proof in measured.proofs],
        "seconds": dict(measured.seconds),
        "config": config.model_dump(),
    }


def _model_summary(model: nn.Module) -> dict[str, Any]:
    return {
        "type": model.config.model_type,  # type: ignore[union-attr]
        "class": class_name(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def _data_summary(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    return {
        "source": config.data.source,
        "tokenizer": corpus.tokenizer.name,
        "sequence_length": corpus.sequence_length,
        "train_documents": corpus.train.num_documents,
        "train_bytes": len(corpus.train.text),
        "held_out_documents": corpus.held_out.num_documents,
        "held_out_bytes": len(corpus.held_out.text),
    }


def _training_summary(history: History) -> dict[str, Any]:
    medians = {
        "step_seconds": statistics.median(record.seconds for record in history.steps),
        "optimizer_step_seconds": statistics.median(
            record.optimizer_seconds for record in history.steps
        ),
    }
    return {
        "steps": len(history.steps),
        "tokens": history.tokens,
        "seconds": history.seconds,
        "tokens_per_second": history.tokens / history.seconds,
        "optimizer_share": optimizer_share(history),
        **medians,
    }


def _loss_summary(history: History, measured: Measured, corpus: Corpus) -> dict[str, Any]:
    scale = 1 / corpus.bytes_per_token
    return {
        "unit": "nats a byte",
        "per_token": scale,  # from a loss a token to one a byte
        "held_out_before": measured.before,
        "held_out": measured.after,
        "evaluated_bytes": round(measured.evaluated_bytes),
        "baselines": dict(measured.baselines),
        "curve": [[record.step, record.loss * scale] for record in history.evals],
    }
