"""`muonloom export` reads what ranks have saved, in whatever boxes."""

from __future__ import annotations

from pathlib import Path

from export.support import trained
from muonloom import checkpoint
from muonloom.checkpoint.reader import CheckpointReader
from muonloom.export_command import run_export
from ranks.checkpoint_runs import hold_in_boxes
from ranks.support import run


def test_export_of_what_ranks_have_saved_in_boxes(tmp_path: Path):
    model, opt = trained("mixtral")
    checkpoint.save(tmp_path / "one", model=model, optimizer=opt, step=2)
    model.config.save_pretrained(tmp_path / "config")
    run(3, hold_in_boxes, str(tmp_path / "one"), str(tmp_path / "three"))
    chunks = [t.chunks for t in CheckpointReader(tmp_path / "three").manifest.tensors.values()]
    assert any(chunk.offsets[0] == 0 and any(chunk.offsets) for own in chunks for chunk in own)
    for dtype in ("bfloat16", "float8_block"):
        files: list[dict[str, bytes]] = []
        for source in ("one", "three"):
            out = tmp_path / f"{source} {dtype}"
            run_export(tmp_path / source, out, dtype=dtype, model=tmp_path / "config")
            files.append({path.name: path.read_bytes() for path in out.iterdir()})
        assert files[0] == files[1]
