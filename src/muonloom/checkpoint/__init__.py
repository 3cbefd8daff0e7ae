"""Checkpoints of model and optimizer that survive a kill, and load into other placements and layouts."""

from muonloom.checkpoint.finding import latest
from muonloom.checkpoint.handle import SaveHandle, SaveReport
from muonloom.checkpoint.loading import load
from muonloom.checkpoint.saving import save

__all__ = ["SaveHandle", "SaveReport", "latest", "load", "save"]
