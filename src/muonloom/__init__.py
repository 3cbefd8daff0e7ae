"""Muon for models whose optimizer state does not fit."""

from muonloom.config import HostPlacement
from muonloom.errors import ConfigError, StaleMasterError
from muonloom.groups import parameter_groups
from muonloom.layout import BlockSpec, Layout, register_family
from muonloom.math import muon_scale, ns_coefficient_names, orthogonalize
from muonloom.optimizer import Muon

__version__ = "0.1.0"

__all__ = [
    "BlockSpec",
    "ConfigError",
    "HostPlacement",
    "Layout",
    "Muon",
    "StaleMasterError",
    "__version__",
    "muon_scale",
    "ns_coefficient_names",
    "orthogonalize",
    "parameter_groups",
    "register_family",
]
