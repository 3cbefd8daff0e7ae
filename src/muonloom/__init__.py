"""Muon for models whose optimizer state does not fit."""

from typing import Any

from muonloom.bfloat16_writer import BFloat16Writer
from muonloom.config import HostPlacement
from muonloom.engines import install_expert_engine
from muonloom.errors import CheckpointError, ConfigError, LostRanksError, StaleMasterError
from muonloom.export import export_weights
from muonloom.float8_writer import Float8BlockWriter
from muonloom.groups import parameter_groups
from muonloom.layout import BlockSpec, Layout, register_family
from muonloom.math import muon_scale, ns_coefficient_names, orthogonalize
from muonloom.optimizer import Muon
from muonloom.sharding import Sharding
from muonloom.version import __version__
from muonloom.writers import ExpertEngine, Writer

__all__ = [
    "BFloat16Writer",
    "BlockSpec",
    "CheckpointError",
    "ConfigError",
    "ExpertEngine",
    "Float8BlockWriter",
    "HostPlacement",
    "Layout",
    "LostRanksError",
    "Muon",
    "Sharding",
    "StaleMasterError",
    "Writer",
    "__version__",
    "export_weights",
    "install_expert_engine",
    "muon_scale",
    "ns_coefficient_names",
    "orthogonalize",
    "parameter_groups",
    "register_family",
]


def __getattr__(name: str) -> Any:
    """Import these when they are first asked for: without them, nothing is paid for them."""
    if name in ("checkpoint", "experts"):
        import importlib

        return importlib.import_module(f"muonloom.{name}")
    raise AttributeError(f"module 'muonloom' has no attribute {name!r}")
