from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from muonloom.train.config_file import load_config
from muonloom.train.plots import plot_run, smoothed
from muonloom.train.run import TrainingRun
from muonloom.train.screen import bytes_text, show


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_have_the_unit_a_reader_would_choose(count, text):
    assert bytes_text(count) == text


def test_the_screen_says_what_the_summary_holds(tiny_config, tmp_path):
    config = load_config(tiny_config)
    summary = TrainingRun(config, console=Console(file=io.StringIO())).execute()
    summary["completion"] = {"prompt": "p", "before": "\x1b[31mred\n\n\nplain", "after": "[bold]x"}
    summary["interrupted"] = True
    console = Console(file=io.StringIO(), width=100)
    show(console, summary)
    shown = console.file.getvalue()
    assert f"{summary['loss']['held_out']:.3f}" in shown
    assert "interrupted after 6 steps" in shown
    assert "7 matrices in" in shown
    assert "[bold]x" in shown  # text of a model is no markup
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_summary_is_standard_json_even_where_a_loss_is_not_finite(tiny_config, tmp_path):
    from muonloom.train.logs import dump_json

    text = dump_json({"loss": float("nan"), "curve": [(1, float("inf"))], "fine": 1.5})
    assert json.loads(text) == {"loss": None, "curve": [[1, None]], "fine": 1.5}


def test_smoothing_is_exact_on_a_constant_and_lags_a_step():
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])
    assert smoothed([]) == []


@pytest.mark.parametrize("values", [[], [(1, 3.0)], [(1, 3.0), (2, float("nan"))]])
def test_a_picture_is_drawn_of_little(tmp_path, values):
    path = tmp_path / "loss.png"
    plot_run(path, title="t", train=values, held_out=values, final=2.5, baselines={})
    assert path.stat().st_size > 1000
