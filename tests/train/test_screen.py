from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from muonloom.train.config_file import load_config
from muonloom.train.plots import plot_run, smoothed
from muonloom.train.run import TrainingRun
from muonloom.train.screen import bytes_text, show

SCREEN_LINES = 56  # of 100 columns; the default run has more kinds of matrices than the tiny one


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
    assert len(shown.splitlines()) <= SCREEN_LINES
    assert "host" not in ledger(shown)
    assert "device state" in ledger(shown)


def test_the_screen_of_a_run_on_the_host_tells_what_moved(tiny_config):
    config = load_config(tiny_config, ["optim.placement=host"])
    summary = TrainingRun(config, console=Console(file=io.StringIO())).execute()
    console = Console(file=io.StringIO(), width=100)
    show(console, summary)
    shown = console.file.getvalue()
    report = summary["last_step"]
    assert re.search(rf"to the device, a step +{bytes_text(report['bytes_in'])}", ledger(shown))
    assert re.search(rf"to the host, a step +{bytes_text(report['bytes_out'])}", ledger(shown))
    assert re.search(r"device slots +12\.0 MiB", ledger(shown))
    assert "device state" not in ledger(shown)
    assert len(shown.splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize(("holds", "mark"), [(True, "✓"), (False, "✗"), (None, "–")])
def test_a_claim_has_a_mark_for_each_end(tiny_config, holds, mark):
    overrides = ["run.proofs=false", "eval.sample_tokens=0", "run.save_model=false"]
    summary = TrainingRun(load_config(tiny_config, overrides), console=Console(file=io.StringIO()))
    shown = summary.execute()
    shown["proofs"] = [{"claim": "the claim", "holds": holds, "detail": "d", "seconds": 0.1}]
    console = Console(file=io.StringIO(), width=100)
    show(console, shown)
    assert re.search(rf"{mark} +the claim", console.file.getvalue())


def ledger(shown: str) -> str:
    """Return the right-hand panel: what stands beside the ladder of losses."""
    lines = shown.splitlines()
    (first,) = [index for index, line in enumerate(lines) if "memory and time" in line]
    (last,) = [index for index, line in enumerate(lines) if "layout" in line and "─" in line]
    return "\n".join(line[60:] for line in lines[first:last])


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
