"""Layouts: which matrices a model has, as data."""

from muonloom.layout.blocks import BlockSpec
from muonloom.layout.cursor import MatrixView
from muonloom.layout.describe import (
    Groups,
    HeadColumns,
    HeadRows,
    Part,
    RowBlocks,
    Sections,
    Transposed,
)
from muonloom.layout.families import family_names, register_family
from muonloom.layout.layout import Kind, Layout
from muonloom.layout.rules import Rule, canonical_name
from muonloom.layout.shares import restricted, row_atoms, stitched

__all__ = [
    "BlockSpec",
    "Groups",
    "HeadColumns",
    "HeadRows",
    "Kind",
    "Layout",
    "MatrixView",
    "Part",
    "RowBlocks",
    "Rule",
    "Sections",
    "Transposed",
    "canonical_name",
    "family_names",
    "register_family",
    "restricted",
    "row_atoms",
    "stitched",
]
