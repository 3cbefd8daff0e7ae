"""What docs/checkpoint-format.md promises, held against the files; checksums against a plain reference."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import muonloom
from checkpoint.support import PLACEMENTS, Run
from muonloom import checkpoint
from muonloom.checkpoint.checksum import checksum
from staging.support import assert_same_bits

# -- the files ----------------------------------------------------------------------------------------


def body_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text(encoding="utf-8"))["body"]


def data_of(path: Path) -> Path:
    (found,) = path.glob("data-*.safetensors")
    return found


@pytest.fixture(scope="module", params=["device", "split"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = Run(PLACEMENTS[request.param]).go(2)
    run.model.counter.add_(5)
    path = tmp_path_factory.mktemp("format") / "c"
    run.save(path, extra={"a": torch.ones(2)})
    return run, path


def test_data_files_are_ordinary_safetensors_files(saved: Any) -> None:
    run, path = saved
    tensors = load_file(data_of(path))
    wanted = {"model.counter": run.model.counter}
    for key, value in run.everything().items():
        name, _, leaf = key.partition("/")
        if leaf == "master_weight":
            wanted[f"model.{name}"] = value
        elif leaf and leaf != "step":
            wanted[f"optimizer.{name}.{leaf}"] = value
    assert_same_bits(tensors, wanted)


def test_the_manifest_says_where_the_bytes_of_each_tensor_are(saved: Any) -> None:
    _, path = saved
    body, content = body_of(path), data_of(path).read_bytes()
    tensors = load_file(data_of(path))
    assert body["tensors"].keys() == tensors.keys()
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    for key, entry in body["tensors"].items():
        value = tensors[key]
        assert (entry["dtype"], entry["shape"]) == (names[value.dtype], list(value.shape))
        (chunk,) = entry["chunks"]
        assert chunk["file"] == data_of(path).name
        assert chunk["sizes"] == entry["shape"]
        assert chunk["offsets"] == [0] * value.ndim
        start = chunk["start"]
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[start : start + len(raw)] == raw
        assert start % 8 == 0 or len(raw) % 8
        row_bytes = len(raw) // max(1, entry["shape"][0])
        assert sum(block["rows"] for block in chunk["blocks"]) == entry["shape"][0]
        for block in chunk["blocks"]:
            end = start + block["rows"] * row_bytes
            assert block["checksum"] == reference(content[start:end])
            assert block["finite"] is True
            start = end


def test_the_head_and_the_checksum_of_the_manifest(saved: Any) -> None:
    _, path = saved
    whole = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert whole.keys() == {"format", "version", "crc32", "body"}
    assert (whole["format"], whole["version"]) == ("muonloom-checkpoint", 1)
    text = json.dumps(whole["body"], sort_keys=True, separators=(",", ":"))
    assert whole["crc32"] == zlib.crc32(text.encode())
    wanted = """step created_s versions tensors aliases parameters options ns_batch_bytes extras files
    model"""
    assert whole["body"].keys() == set(wanted.split())
    assert whole["body"]["versions"] == {
        "muonloom": muonloom.__version__,
        "torch": torch.__version__,
    }


def test_files_are_listed_with_their_sizes_and_nothing_else_is_there(saved: Any) -> None:
    _, path = saved
    body = body_of(path)
    found = {file.name: file.stat().st_size for file in path.iterdir()}
    del found["manifest.json"]
    assert {name: entry["nbytes"] for name, entry in body["files"].items()} == found
    (extra,) = body["extras"]
    assert body["files"][extra]["checksum"] == reference((path / extra).read_bytes())
    assert torch.load(path / extra, weights_only=True)["a"].tolist() == [1.0, 1.0]
    nonces = {name.split("-")[1] for name in found}
    assert len(nonces) == 1
    assert len(nonces.pop()) == 16


def test_parameters_and_options_are_listed_by_name(saved: Any) -> None:
    run, path = saved
    body = body_of(path)
    assert body["parameters"].keys() == {name for name, _ in run.named}
    for name, parameter in run.named:
        entry = body["parameters"][name]
        group = next(g for g in run.opt.param_groups if any(p is parameter for p in g["params"]))
        assert entry["algorithm"] == group["algorithm"]
        assert entry["step"] == (2.0 if entry["algorithm"] == "adamw" else None)
        assert entry["dtype"] == "bfloat16"
        assert body["options"][entry["options"]]["lr"] == group["lr"]
        assert body["options"][entry["options"]]["momentum_dtype"] == {"dtype": "float32"}


def test_large_tensors_are_cut_into_blocks_of_whole_rows(tmp_path: Path) -> None:
    shapes = {"table.weight": (9000, 130), "odd": (7,), "a": (4, 4)}
    named = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    model = torch.nn.Module()
    model.table = torch.nn.Module()
    model.table.weight, model.odd, model.a = (parameter for _, parameter in named)
    layout = muonloom.Layout.from_shapes(
        shapes, overrides={"table.weight": "adamw", "odd": "adamw"}
    )
    opt = muonloom.Muon(named, layout=layout, lr=0.1, adamw_lr=0.1)
    checkpoint.save(tmp_path / "c", model=model, optimizer=opt, step=0)
    entry = body_of(tmp_path / "c")["tensors"]["model.table.weight"]
    rows = [block["rows"] for block in entry["chunks"][0]["blocks"]]
    assert len(rows) > 1
    assert sum(rows) == 9000
    assert torch.equal(load_file(data_of(tmp_path / "c"))["model.table.weight"], named[0][1])
    before = named[0][1].detach().clone()
    named[0][1].data.zero_()
    checkpoint.load(tmp_path / "c", model=model, optimizer=opt)
    assert torch.equal(named[0][1], before)


def test_what_is_not_finite_is_marked(tmp_path: Path) -> None:
    run = Run("device").go(1)
    run.opt.state[dict(run.named)["conv.weight"]]["momentum_buffer"][-1] = float("nan")
    run.save(tmp_path / "c")
    marked = {
        key
        for key, entry in body_of(tmp_path / "c")["tensors"].items()
        for block in entry["chunks"][0]["blocks"]
        if not block["finite"]
    }
    assert marked == {"optimizer.conv.weight.momentum_buffer"}


# -- checksums ----------------------------------------------------------------------------------------


PAGE_BYTES, DIGESTED_BYTES = 4096, 32768


def reference(data: bytes) -> str:
    """What the document says, in plain Python."""
    packed = data
    if len(data) > DIGESTED_BYTES:
        pages = [data[i : i + PAGE_BYTES] for i in range(0, len(data), PAGE_BYTES)]
        packed = b"".join(page_sum(page).to_bytes(8, "little") for page in pages)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def page_sum(page: bytes) -> int:
    words = (page[i : i + 8].ljust(8, b"\0") for i in range(0, len(page), 8))
    return sum(int.from_bytes(word, "little") for word in words) % 2**64


def bytes_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def taken(data: bytes, shift: int = 0) -> str:
    """The checksum of bytes that lie `shift` behind an aligned address."""
    room = torch.frombuffer(bytearray(bytes(shift) + data + b"\xff" * 8), dtype=torch.uint8)
    return checksum(room[shift : shift + len(data)])


SIZES = st.one_of(
    st.integers(0, 100),
    st.integers(0, 6 * DIGESTED_BYTES + 9),
    st.sampled_from([8, 32767, 32768, 32769, 32776, 36864, 36863, 36865, 65536]),
)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), nbytes=SIZES, shift=st.integers(0, 9))
def test_checksums_are_those_of_the_document(seed: int, nbytes: int, shift: int) -> None:
    data = bytes_of(seed, nbytes)
    assert taken(data, shift) == reference(data)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32), nbytes=SIZES.filter(bool), where=st.floats(0, 1, exclude_max=True)
)
def test_a_flipped_bit_changes_the_checksum(seed: int, nbytes: int, where: float) -> None:
    data = bytearray(bytes_of(seed, nbytes))
    before = taken(bytes(data))
    bit = int(where * 8 * nbytes)
    data[bit // 8] ^= 1 << bit % 8
    assert taken(bytes(data)) != before


def test_every_bit_of_a_small_block_counts() -> None:
    data = bytearray(bytes_of(0, 83))
    found = {taken(bytes(data))}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found.add(taken(bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(data) + 1


def exchanged(data: bytes, one: int, other: int, nbytes: int) -> bytes:
    """Have two pieces of `nbytes`, given by their numbers, in each other's place."""
    found = bytearray(data)
    places = [slice(nbytes * number, nbytes * (number + 1)) for number in (one, other)]
    found[places[0]], found[places[1]] = data[places[1]], data[places[0]]
    return bytes(found)


@pytest.mark.parametrize("nbytes", [400_000, 32_768, 4096])
def test_signs_of_two_numbers_and_words_that_moved_change_the_checksum(nbytes: int) -> None:
    """Those of two pages, where there are sums of pages."""
    data = bytes_of(3, nbytes)
    before, choose = taken(data), random.Random(4)
    for _ in range(50):
        one, other = choose.sample(range(nbytes // 8), 2)
        if nbytes > DIGESTED_BYTES and one // 512 == other // 512:
            continue
        signs = bytearray(data)
        for word in (one, other):
            signs[8 * word + 7] ^= 0x80
        assert taken(bytes(signs)) != before
        assert taken(exchanged(data, one, other, 8)) != before


def test_pages_that_changed_places_change_the_checksum() -> None:
    data = bytes_of(6, 4 << 20)
    before, choose = taken(data), random.Random(7)
    for page in (4096, 16384, 65536):
        for _ in range(10):
            one, other = choose.sample(range(len(data) // page), 2)
            assert taken(exchanged(data, one, other, page)) != before
