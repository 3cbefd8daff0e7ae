"""The learning rate's way through a run, as a factor on every group's own rate."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from muonloom.train.config import ScheduleConfig


def lr_factor(step: int, schedule: ScheduleConfig) -> float:
    """Return the factor of step `step` (from 0): warm-up, plateau, decay.

    It rises linearly and is 1 from step ``warmup_steps`` on; over the last ``decay_fraction`` of
    the run it falls from 1 towards ``final_fraction``, which it would reach at step ``steps``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    begin = max(schedule.warmup_steps, schedule.steps * (1 - schedule.decay_fraction))
    if schedule.decay == "none" or step <= begin:
        return 1.0
    progress = min((step - begin) / (schedule.steps - begin), 1.0)
    if schedule.decay == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1.0 + (schedule.final_fraction - 1.0) * progress


def make_scheduler(optimizer: Optimizer, schedule: ScheduleConfig) -> LambdaLR:
    """Return torch's scheduler that multiplies each group's rate by `lr_factor`."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, schedule))
