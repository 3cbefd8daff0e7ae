"""Coefficient tables, the two iterations, recipes, learning-rate factors; split masters and FP8 blocks."""

from muonloom.math.coefficients import (
    COEFFICIENT_TABLES,
    DEFAULT_COEFFICIENTS,
    Coefficients,
    CoefficientTable,
    Triple,
    expand_coefficients,
    ns_coefficient_names,
)
from muonloom.math.float8 import decode_float8, encode_float8_, scale_shape
from muonloom.math.normalize import normalize_
from muonloom.math.orthogonalize import orthogonalize
from muonloom.math.recipe import (
    Recipe,
    has_fast_bfloat16,
    iterate,
    make_recipe,
    workspace_numel,
)
from muonloom.math.scale import ADJUST_LR_FNS, muon_scale
from muonloom.math.split import has_overflow, join_, low_halves, settle_ties_

__all__ = [
    "ADJUST_LR_FNS",
    "COEFFICIENT_TABLES",
    "DEFAULT_COEFFICIENTS",
    "CoefficientTable",
    "Coefficients",
    "Recipe",
    "Triple",
    "decode_float8",
    "encode_float8_",
    "expand_coefficients",
    "has_fast_bfloat16",
    "has_overflow",
    "iterate",
    "join_",
    "low_halves",
    "make_recipe",
    "muon_scale",
    "normalize_",
    "ns_coefficient_names",
    "orthogonalize",
    "scale_shape",
    "settle_ties_",
    "workspace_numel",
]
