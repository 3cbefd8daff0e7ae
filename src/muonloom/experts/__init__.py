"""Expert weights that live in FP8, with no other copy of them on the device."""

from muonloom.experts.engine import Float8Experts

__all__ = ["Float8Experts"]
