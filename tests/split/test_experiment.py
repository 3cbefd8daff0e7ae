"""The experiment of docs/muon-split.md: its parts, a short run, and that the document agrees with them."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonloom
from layout.tiny import fresh
from muonloom import BlockSpec, Layout
from muonloom.bench import split_experiment as experiment
from muonloom.bench.split_change import Change, measure_changes
from muonloom.bench.split_report import (
    COLORS,
    GLM5_HEADS,
    GLM5_KV_B,
    GLM5_Q_B,
    Curves,
    change_table,
    experiment_table,
    flops_table,
    replace_section,
    write_plots,
)
from muonloom.train.data import Corpus, load_corpus
from muonloom.train.plots import smoothed
from split.support import with_gradients

ROOT = Path(__file__).parents[2]
CONFIG, GUIDE = ROOT / "configs" / "default.toml", ROOT / "docs" / "muon-split.md"
HEADS = experiment.HEADS


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(experiment.experiment_config(CONFIG, steps=3).data)


def test_variants_start_alike_and_differ_only_in_how_heads_move(corpus: Corpus) -> None:
    config = experiment.experiment_config(CONFIG, steps=3)
    few = config.eval.model_copy(update={"every": 3, "sequences": 8})
    config = config.model_copy(update={"eval": few})
    whole, single = (experiment.train_variant(config, corpus, v) for v in ("whole", "k = 1"))
    # Same weights, same batch, same attention; the first update makes the difference.
    assert whole.losses[0] == single.losses[0]
    assert whole.largest_logit[0] == single.largest_logit[0]
    assert whole.gradient_spread["q_b_proj"][0] == single.gradient_spread["q_b_proj"][0]
    assert whole.losses[2] != single.losses[2]
    # The gains reach from 1/4 to 4, and the gradients follow them.
    assert whole.gradient_spread["kv_b_proj"][0] > experiment.GAIN_RATIO / 2
    for kind in ("q_b_proj", "kv_b_proj"):
        assert min(whole.update_spread[kind]) > 1.2
        assert max(single.update_spread[kind]) < 1.02
        assert len(single.update_spread[kind]) == len(single.losses) == 3
    assert single.held_out[-1][0] == 3


def test_the_probe_is_eager_attention_and_sees_the_largest_logit() -> None:
    probe = experiment.LogitProbe()
    probe.install()
    gradients, logits = [], []
    for name in ("eager", experiment.ATTENTION):
        model = fresh("glm_moe_dsa").train()
        model.set_attn_implementation(name)  # type: ignore[operator]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 3  # far from uniform attention
        with_gradients(model, batch=2, tokens=16)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        logits.append(probe.take())
    torch.testing.assert_close(gradients[0], gradients[1])
    assert logits[0] == -float("inf")  # eager attention of the model itself passes it by
    assert 0 < logits[1] < 100
    assert probe.take() == -float("inf")


def test_the_largest_logit_is_that_of_pairs_the_mask_admits() -> None:
    probe = experiment.LogitProbe()
    query = torch.tensor([[1.0], [2.0]])[None, None]
    key = torch.tensor([[3.0], [50.0]])[None, None]
    mask = torch.tensor([[0.0, torch.finfo(torch.float32).min], [0.0, -100.0]])
    module = nn.Identity().train()
    out, weights = probe(module, query, key, key, mask, scaling=0.5)
    assert probe.take() == 3.0
    assert out.shape == (1, 2, 1, 1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 2))
    probe(module.eval(), query, key, key, mask, scaling=0.5)
    assert probe.take() == -float("inf")


def test_gains_scale_each_heads_output() -> None:
    model = fresh("glm_moe_dsa", num_attention_heads=HEADS, num_key_value_heads=HEADS)
    projection = model.get_submodule("model.layers.0.self_attn.o_proj")
    ones = torch.ones(1, HEADS * 12)
    plain = [projection(ones * _head(h)) for h in range(HEADS)]
    experiment.set_head_gains(model)
    gained = [projection(ones * _head(h)) for h in range(HEADS)]
    ratios = [float((g.norm() / p.norm()).detach()) for g, p in zip(gained, plain, strict=True)]
    assert ratios[0] == pytest.approx(0.25)
    assert ratios[-1] == pytest.approx(4)
    assert statistics.geometric_mean(ratios) == pytest.approx(1)


def _head(h: int) -> torch.Tensor:
    return torch.eye(HEADS)[h].repeat_interleave(12)


def test_the_recorder_takes_decay_off_and_finds_the_spread() -> None:
    model = nn.Module()
    model.q_b_proj = nn.Linear(6, HEADS * 4, bias=False)
    model.kv_b_proj = nn.Linear(6, HEADS * 5, bias=False)
    names = [name for name, _ in model.named_parameters()]
    specs: dict[str, Any] = {n: BlockSpec.heads(HEADS, heads_per_block=1) for n in names}
    layout = Layout.from_shapes({n: p.shape for n, p in model.named_parameters()}, overrides=specs)
    opt = muonloom.Muon(
        model.named_parameters(),
        layout=layout,
        lr=0.1,
        weight_decay=0.5,
        ns_coefficients="polar_express_1.01",
        ns_steps=16,
        ns_compute_dtype=torch.float32,
    )
    recorder = experiment.HeadRecorder(model, opt)
    sizes = torch.logspace(0, 2, HEADS)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        heads = parameter.grad.view(HEADS, -1)
        heads *= (sizes / heads.norm(dim=1))[:, None]
    opt.step()
    for kind in ("q_b_proj", "kv_b_proj"):
        assert recorder.gradient_spread[kind] == [pytest.approx(100, rel=1e-4)]
        assert recorder.update_spread[kind] == [pytest.approx(1, abs=1e-3)]


def _curves(variant: str, seed: int) -> Curves:
    ramp = [1.0 + i / 100 for i in range(20)]
    both = {"q_b_proj": ramp, "kv_b_proj": [2 * v for v in ramp]}
    return Curves(
        variant=variant,
        seed=seed,
        losses=ramp[::-1],
        held_out=[(10, 1.5), (20, 1.25)],
        update_spread=both,
        gradient_spread=both,
        largest_logit=ramp,
        ns_calls=7,
    )


def test_tables_and_curves_say_what_was_recorded(tmp_path: Path) -> None:
    curves = [_curves(v, seed) for seed in (0, 1) for v in experiment.VARIANTS]
    lines = experiment_table(curves)
    assert COLORS.keys() == experiment.VARIANTS.keys()
    variants = [v for v in experiment.VARIANTS for _ in (0, 1)]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {v}" for v in variants]
    assert lines[2] == (
        "| whole | 0 | 1.250 | 1.005 | 1.1, 2.2 | 1.0950 (1.1900) | 2.1900 (2.3800) | 1.2 (1.2) | 7 |"
    )
    write_plots(tmp_path, curves)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"split-loss.png", "split-update-spread.png", "split-largest-logit.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_sections_are_replaced_and_only_they() -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb <!-- y:begin --><!-- y:end -->\n"
    new = replace_section(text, "x", ["new"])
    assert new == text.replace("\nold\n", "\n\nnew\n\n")
    assert replace_section(new, "x", ["new"]) == new
    with pytest.raises(ValueError, match=r"^--doc: .*z:begin"):
        replace_section(text, "z", [])


def test_a_document_without_markers_is_an_error_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doc = tmp_path / "doc.md"
    doc.write_text("nothing\n")
    assert experiment.main(["--doc", str(doc), "--config", str(CONFIG)]) == 2
    assert "--doc: got no markers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        experiment.main(["--steps", "1"])


def test_flops_are_the_formula_written_out() -> None:
    def five_steps(short: int, long: int) -> int:
        return 5 * (4 * short**2 * long + 2 * short**3)

    assert GLM5_Q_B.flops(64, 64) == five_steps(2048, 64 * 256)
    assert GLM5_Q_B.flops(64, 1) == 64 * five_steps(256, 2048)
    assert GLM5_KV_B.flops(64, 64) == five_steps(512, 64 * 448)
    assert GLM5_KV_B.flops(64, 1, components=True) == 64 * (
        five_steps(192, 512) + five_steps(256, 512)
    )
    whole, single = (sum(p.flops(GLM5_HEADS, k) for p in (GLM5_Q_B, GLM5_KV_B)) for k in (64, 1))
    assert GLM5_Q_B.flops(64, 64) / GLM5_Q_B.flops(64, 1) == pytest.approx(8.0, abs=0.05)
    assert whole / single == pytest.approx(4.3, abs=0.05)
    assert "| 64 (whole) | 1.46e+12 | 1.52e+11 | 1.61e+12 | 1.0 |" in flops_table()


def test_changes_are_reported_for_whole_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from muonloom.bench import split_change

    monkeypatch.setattr(split_change, "BLOCKS", (1,))
    changes = measure_changes()
    assert [(c.polynomial.split(",")[0], c.heads_per_block) for c in changes] == [
        ("polar_express_1.01", 1),
        ("default triple", 1),
    ]
    accurate = changes[0]
    assert accurate.least == pytest.approx(1, abs=0.01)
    assert accurate.most == pytest.approx(1, abs=0.01)
    assert accurate.sum_of_steps == pytest.approx(4, abs=0.04)
    assert accurate.end_to_end <= 16.2  # steps of one length, all alike: four squared
    for change in changes:
        assert change.least <= change.total <= change.most
    row = Change(
        polynomial="p",
        heads_per_block=None,
        total=1,
        least=0.5,
        most=2,
        sum_of_steps=4,
        end_to_end=9,
        end_to_end_square=0.0153,
    )
    assert (
        change_table([row])[2]
        == "| p | whole | 1.0000 | 0.5000 – 2.0000 | 4.000 | 9.000 | 0.0153 |"
    )


@pytest.mark.slow
def test_the_one_command_writes_curves_and_tables(tmp_path: Path) -> None:
    doc, images = tmp_path / "doc.md", tmp_path / "images"
    doc.write_text("".join(f"<!-- {s}:begin -->\n<!-- {s}:end -->\n" for s in experiment.SECTIONS))
    arguments = ["--steps", "3", "--seeds", "1", "--config", str(CONFIG)]
    assert experiment.main([*arguments, "--doc", str(doc), "--out", str(images)]) == 0
    text = doc.read_text()
    assert text.count("\n| whole | 0 |") == 1
    assert "| polar_express_1.01, 16 steps | whole | 1.0000 |" in text
    assert len(list(images.glob("split-*.png"))) == 3


def test_the_code_of_the_document_runs_and_its_figures_are_the_formulas() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)
    assert "\n".join(flops_table()) in text
    for name in re.findall(r"\]\((images/[^)]+)\)", text):
        assert (GUIDE.parent / name).is_file()


def test_smoothing_keeps_constants() -> None:
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
