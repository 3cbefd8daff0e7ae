"""Weights that are not where they were, and what is asked of the optimizer between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from engines.cases import REFUSED, Case, started
from engines.support import (
    assert_equal,
)
from fresh import Fresh


def apply_to_masters(case: Case) -> None:
    case.opt.apply_to_masters([case.parameter()], lambda master: master * 0.5)


def load_state_dict(case: Case) -> None:
    case.opt.load_state_dict(case.saved)


@pytest.mark.parametrize("kind", ["storage swapped", "tensors moved", "engine lets go"])
@pytest.mark.parametrize("use", [apply_to_masters, load_state_dict], ids=lambda use: use.__name__)
def test_what_writes_weights_outside_of_steps_looks_too(use: Callable[[Case], None], kind: str):
    change, by_engine = REFUSED[kind]
    case = started("device", by_engine=by_engine)
    case.saved = copy.deepcopy(case.opt.state_dict())
    train_on = case.bytes_of_everything()
    change(case)
    with pytest.raises(RuntimeError, match=r"^down: got a writer's storage"):
        use(case)
    assert_equal(train_on, case.bytes_of_everything())


# A crash ends the process, so that each case has one of its own; a fork has torch already.
CRASHES = """
import copy, os, sys, torch, muonloom
from muonloom import HostPlacement

def start(placement, dtype):
    generator = torch.Generator().manual_seed(0)
    named = [
        (name, torch.nn.Parameter(torch.randn(8, 4, generator=generator).to(dtype)))
        for name in ("a.weight", "b.weight")
    ]
    opt = muonloom.Muon(named, placement=placement, lr=0.1)
    for step in range(2):
        for _, p in named:
            p.grad = torch.ones_like(p)
        opt.step()
    opt.drain()
    named[0][1].untyped_storage().resize_(0)
    return named, opt

PLACES = {"device": "device", "split": HostPlacement(master_layout="split")}
USES = {
    "apply_to_masters": lambda named, opt: opt.apply_to_masters([named[0][1]], lambda m: m * 0.5),
    "refresh_masters": lambda named, opt: opt.refresh_masters(),
    "get_full_parameter_master": lambda named, opt: opt.get_full_parameter_master(named[0][1]),
    "state_dict": lambda named, opt: opt.state_dict(),
    "rebind": lambda named, opt: opt.rebind(named[0][1]),
    "release": lambda named, opt: opt.release(),
    "step": lambda named, opt: opt.step(),
    "copy": lambda named, opt: copy.deepcopy(opt),
    "build and step": lambda named, opt: muonloom.Muon(named, lr=0.1).step(),
}
torch.set_num_threads(1)
start("device", torch.float32)  # what is imported late is imported once, before the forks
for place, placement in PLACES.items():
    for dtype in (torch.bfloat16, torch.float32):
        for use, call in USES.items():
            sys.stdout.flush()
            child = os.fork()
            if not child:
                named, opt = start(placement, dtype)
                try:
                    call(named, opt)
                    print(place, dtype, use, "|", "works")
                except Exception as error:
                    print(place, dtype, use, "|", str(error).splitlines()[0])
                sys.stdout.flush()
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                print(place, dtype, use, "|", "crashed")
"""


def test_nothing_reads_a_storage_that_was_released(fresh: Fresh):
    done = fresh.run(CRASHES)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert len(told) == 2 * 2 * 9
    bad = {k: v for k, v in told.items() if v != "works" and not v.startswith("a.weight: got ")}
    assert not bad
    works = {k.split(" ", 2)[2] for k, v in told.items() if v == "works"}
    assert works <= {"get_full_parameter_master", "state_dict"}  # of masters that are whole
