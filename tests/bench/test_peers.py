from __future__ import annotations

import sys
import types
import typing

import pytest
import torch

from muonloom.bench import peers
from muonloom.bench.peers import PEERS, REFERENCE, Missing, Peer, load_peers, standard_iteration
from muonloom.math import orthogonalize


def test_the_published_iteration_agrees_with_ours():
    for shape in ((5, 8, 20), (5, 20, 8)):
        x = torch.randn(shape)
        y = standard_iteration(x, 5, torch.float32)
        torch.testing.assert_close(y, orthogonalize(x), rtol=1e-3, atol=1e-4)


def test_peers_that_are_not_installed_or_broken_say_so(monkeypatch):
    def broken():
        raise OSError("no such library")

    monkeypatch.setitem(PEERS, "absent", ("a_module_that_is_not_there", peers.heavyball))
    monkeypatch.setitem(PEERS, "broken", (None, broken))
    loaded = {peer.name: peer for peer in load_peers()}
    assert loaded["absent"] == Missing(name="absent", status="not installed")
    assert loaded["broken"] == Missing(name="broken", status="failed: OSError: no such library")
    assert isinstance(loaded[REFERENCE], Peer)
    assert next(iter(PEERS)) == REFERENCE


def test_names_of_loaded_peers_are_those_of_the_table():
    for name, peer in zip(PEERS, load_peers(), strict=True):
        assert peer.name == name


def test_every_peer_orthogonalizes_with_its_own_coefficients():
    x = torch.randn(2, 16, 48)
    for peer in load_peers():
        if isinstance(peer, Missing):
            continue
        y = (
            peer.orthogonalize(x, 5)
            if peer.batched
            else torch.stack([peer.orthogonalize(matrix, 5) for matrix in x])
        )
        wanted = orthogonalize(x, ns_coefficients=peer.coefficients)
        # BF16, and HeavyBall rounds stochastically
        assert float((y.float() - wanted).norm() / wanted.norm()) < 0.05


def test_typing_override_is_lent_to_an_import_only(monkeypatch):
    monkeypatch.delattr(typing, "override", raising=False)
    with peers._typing_override():
        assert typing.override(len) is len
    assert not hasattr(typing, "override")


def test_the_adapter_of_emerging_optimizers_asks_for_its_precision(monkeypatch):
    asked = []

    class Precision:
        def __init__(self, precision):
            asked.append(precision)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    def newton_schulz(x, steps, coefficient_type):
        asked.append((steps, coefficient_type))
        return x

    package = types.ModuleType("emerging_optimizers")
    optimizers = types.ModuleType("emerging_optimizers.orthogonalized_optimizers")
    optimizers.muon = types.SimpleNamespace(
        muon_utils=types.SimpleNamespace(newton_schulz=newton_schulz)
    )
    utils = types.ModuleType("emerging_optimizers.utils")
    utils.fp32_matmul_precision = Precision
    for module in (package, optimizers, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    peers.emerging_float32().orthogonalize(torch.ones(2, 2), 5)
    peers.emerging_bfloat16().orthogonalize(torch.ones(2, 2), 3)
    assert asked == ["highest", (5, "simple"), "medium", (3, "simple")]


def test_heavyball_is_run_eagerly_with_five_steps(monkeypatch):
    package, utils = types.ModuleType("heavyball"), types.ModuleType("heavyball.utils")
    utils.compile_mode = "max-autotune"
    utils.zeropower_via_newtonschulz5 = lambda x, steps: (x, steps)
    package.utils = utils
    monkeypatch.setitem(sys.modules, "heavyball", package)
    monkeypatch.setitem(sys.modules, "heavyball.utils", utils)
    peer = peers.heavyball()
    assert utils.compile_mode is None
    assert peer.orthogonalize("x", 5) == ("x", 5)
    with pytest.raises(AttributeError):
        peer.optimizer([])
