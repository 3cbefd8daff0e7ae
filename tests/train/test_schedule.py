from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonloom.train.config import ScheduleConfig
from muonloom.train.schedule import lr_factor, make_scheduler


def test_warm_up_rises_to_one():
    schedule = ScheduleConfig(steps=20, warmup_steps=4, decay="none")
    factors = [lr_factor(step, schedule) for step in range(6)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_linear_decay_over_the_last_part():
    schedule = ScheduleConfig(steps=100, decay_fraction=0.2, final_fraction=0.5)
    assert lr_factor(80, schedule) == 1.0
    assert lr_factor(90, schedule) == pytest.approx(0.75)
    assert lr_factor(100, schedule) == pytest.approx(0.5)


def test_cosine_is_half_way_at_half_time():
    schedule = ScheduleConfig(steps=100, decay="cosine", final_fraction=0.1)
    assert lr_factor(50, schedule) == pytest.approx(0.55)
    assert lr_factor(100, schedule) == pytest.approx(0.1)


@given(
    steps=st.integers(1, 50),
    warmup=st.integers(0, 49),
    decay=st.sampled_from(["linear", "cosine", "none"]),
    fraction=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_factors_stay_between_zero_and_one_and_only_fall_after_the_warm_up(
    steps, warmup, decay, fraction, final
):
    warmup = min(warmup, steps - 1)
    schedule = ScheduleConfig(
        steps=steps,
        warmup_steps=warmup,
        decay=decay,
        decay_fraction=fraction,
        final_fraction=final,
    )
    factors = [lr_factor(step, schedule) for step in range(steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    rising = factors[: warmup + 1]
    assert all(later > earlier for earlier, later in pairwise(rising))
    assert factors[warmup] == 1.0
    after = factors[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


def test_the_scheduler_multiplies_each_groups_own_rate():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 0.1}]
    )
    scheduler = make_scheduler(optimizer, ScheduleConfig(steps=10, warmup_steps=1, decay="none"))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.1])
