from __future__ import annotations

import json

import pytest
import torch

from muonloom.bench import run_bench
from muonloom.bench.__main__ import main as command
from muonloom.bench.peers import LOOPED_FP32, PEERS, REFERENCE, torch_muon
from muonloom.bench.report import (
    BEGIN,
    END,
    STAGING_BEGIN,
    STAGING_END,
    main,
    write_between_markers,
)
from muonloom.bench.shapes import QUICK_BATCHES

ENTRY_KEYS = {"name", "role", "dtype", "status", "note"}
TIMED_KEYS = ENTRY_KEYS | {
    "measured",
    "rounds",
    "samples_s",
    "median_s",
    "quartiles_s",
    "flops",
    "flops_per_s",
    "ratio",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One quick run: the JSON's path and what it says."""
    path = tmp_path_factory.mktemp("bench") / "deep" / "bench.json"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muonloom.bench.timing.LEAST_SAMPLE_S", 1e-3)
        run_bench(out=path, quick=True, threads=1)
    assert torch.get_num_threads() == threads
    return path, json.loads(path.read_text())


def test_the_report_says_when_where_and_with_what(run):
    _, report = run
    assert report["schema"] == 1
    assert report["command"] == "muonloom bench --quick"
    assert report["date"].endswith("+00:00")
    assert report["quick"] is True
    assert report["machine"]["threads"] == 1
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["torch"] == torch.__version__
    assert {"python", "muonloom", "heavyball", "emerging-optimizers"} <= set(report["versions"])


def test_every_work_has_every_contender_with_its_samples(run):
    _, report = run
    names = [work["name"] for work in report["works"]]
    assert names == [shape.name for shape in QUICK_BATCHES] + ["whole step"]
    for work in report["works"]:
        found = {entry["name"]: entry for entry in work["contenders"]}
        assert found["muonloom"]["ratio"] == 1.0
        assert found[REFERENCE]["status"] == "ok"
        for entry in work["contenders"]:
            if entry["status"] == "ok":
                assert set(entry) >= TIMED_KEYS
                assert len(entry["samples_s"]) == entry["rounds"] == report["rounds"]
                assert all(sample > 0 for sample in entry["samples_s"])
            else:
                assert set(entry) >= ENTRY_KEYS
        if work["kind"] == "orthogonalization":
            looped = set() if work["shape"][0] > 1 else {LOOPED_FP32}
            assert set(PEERS) - looped <= set(found)
            assert found["muonloom"]["gate"]["passed"]
            assert len(found["muonloom"]["gate"]["spectra"]) == 5
            assert work["ceilings"]["float32"] > 0
            assert work["bound"] > 0


def test_the_step_reports_its_phases_and_matrices(run):
    _, report = run
    step = report["works"][-1]
    assert sum(count for _, _, count in step["matrices"]) == 2 * (5 + 3 * 3)
    assert 0 < step["share_outside_orthogonalization"] < 1
    assert {"guard", "orthogonalize"} <= set(step["phases_s"][0])


def test_figures_are_made_of_the_works(run):
    _, report = run
    step = report["works"][-1]
    ratio = next(f for f in report["figures"] if f["name"].startswith("whole step"))
    reference = next(e for e in step["contenders"] if e["name"] == REFERENCE)
    ours = next(e for e in step["contenders"] if e["name"] == "muonloom")
    assert ratio["value"] == reference["median_s"] / ours["median_s"]


def test_the_run_includes_muon_split(run):
    _, report = run
    names = [work["name"] for work in report["split"]["works"]]
    assert names == ["tiny: q_b", "tiny: q_b + kv_b", "whole step, 4 layers"]
    for work in report["split"]["works"]:
        assert min(r["orthogonalize_ratio"] for r in work["rows"] if not r["heads_per_block"]) == 1
        for entry in work["rows"]:
            assert entry["step"]["rounds"] == report["rounds"]
            assert entry["flops_ratio"] > 0
    named = " ".join(figure["name"] for figure in report["figures"])
    assert "tiny: q_b + kv_b, k = 1, components ÷ whole" in named
    assert "one at a time ÷ batched" in named


@pytest.mark.parametrize(
    ("only", "works", "shown_by"),
    [
        ("orthogonalization", [shape.name for shape in QUICK_BATCHES], None),
        ("step", ["whole step"], None),
        ("split", [], "Muon Split"),
        ("staging", [], "Host placement"),
    ],
)
def test_one_part_can_be_run_alone(only, works, shown_by, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("muonloom.bench.timing.LEAST_SAMPLE_S", 1e-3)
    monkeypatch.setattr("muonloom.bench.load_peers", lambda: [torch_muon()])
    command(["--quick", "--only", only, "--out", str(tmp_path / "part.json")])
    report = json.loads((tmp_path / "part.json").read_text())
    assert report["command"] == f"muonloom bench --quick --only {only}"
    assert [work["name"] for work in report["works"]] == works
    for part in ("split", "staging"):
        assert (report[part] is not None) == (only == part)
    assert report["figures"] or only == "orthogonalization"
    shown = capsys.readouterr().out
    for title in ("Muon Split", "Host placement"):
        assert (title in shown) == (title == shown_by)


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^only: got 'steps'; wanted one of orthogonalization"):
        run_bench(out=tmp_path / "none.json", quick=True, only="steps")
    assert not (tmp_path / "none.json").exists()


def test_the_docs_table_is_written_from_the_json(run, tmp_path):
    path, report = run
    page = tmp_path / "benchmarks.md"
    middle = f"{STAGING_BEGIN}\nold\n{STAGING_END}\nbetween\n"
    page.write_text(f"before\n{middle}{BEGIN}\nold\n{END}\nafter\n")
    main([str(path), "--docs", str(page)])
    text = page.read_text()
    assert text.startswith(f"before\n{STAGING_BEGIN}\n")
    assert f"{STAGING_END}\nbetween\n{BEGIN}\n" in text
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert report["date"] in text
    assert f"| {REFERENCE} |" in text
    assert "**Muon Split, tiny: q_b**" in text
    assert "Host placement" in text.partition(STAGING_END)[0]
    assert "Host placement" not in text.partition(STAGING_END)[2]
    main([str(path), "--docs", str(page)])
    assert page.read_text() == text


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="docs: got no text between"):
        write_between_markers("no markers", "table")


def test_without_a_path_the_json_gets_the_date_as_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = {"works": [], "figures": [], "elapsed_s": 1.0}
    monkeypatch.setattr("muonloom.bench._measure", lambda **_: empty)
    monkeypatch.setattr("muonloom.bench.report.print_report", lambda report: None)
    run_bench(out=None, quick=True)
    (written,) = (tmp_path / "runs" / "bench").glob("*.json")
    assert json.loads(written.read_text()) == empty
