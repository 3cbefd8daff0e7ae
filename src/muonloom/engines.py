"""Writers and engines of an optimizer: registered, bound, and asked before and after each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from muonloom.assembly import Assembly
from muonloom.assignment import Assignment
from muonloom.bfloat16_writer import BFloat16Writer
from muonloom.dtensors import is_dtensor
from muonloom.engine import Engine
from muonloom.errors import complaint
from muonloom.failures import refuse_released
from muonloom.handles import RemovableContext
from muonloom.masters import MasterBook
from muonloom.state import MASTER_KEYS, drop_master, lasting
from muonloom.weights import DeviceWeights, collect_writers
from muonloom.writers import ExpertEngine, Writer

_installed: list[InstalledEngine] = []


class InstalledEngine(RemovableContext):
    """Ends an installation; as a context manager, on leaving."""

    def __init__(self, engine: ExpertEngine) -> None:
        self.engine = engine

    def remove(self) -> None:
        """Have optimizers that are built from now on know nothing of the engine."""
        _installed[:] = [known for known in _installed if known is not self]


def install_expert_engine(engine: ExpertEngine) -> InstalledEngine:
    """Bind `engine` to every optimizer that is built meanwhile, for the parameters that it holds.

    For trainers that build the optimizer themselves. Where it holds none of an optimizer's parameters,
    and where none is installed, nothing changes.

    Returns:
        A handle whose ``remove()`` ends it; also a context manager.
    """
    _installed.append(InstalledEngine(engine))
    return _installed[-1]


class EngineBinding(Optimizer):
    """The part of `Muon` that has device weights written by others than itself."""

    _assembly: Assembly
    _assignments: dict[Tensor, Assignment]
    _masters: MasterBook
    _weights: DeviceWeights
    _released: dict[Tensor, str]

    def _current_engine(self) -> Engine:
        raise AssertionError("the optimizer overrides this")

    def register_writer(self, param: Tensor, writer: Writer) -> None:
        """Have `writer` write the device weight of `param`, instead of the parameter itself.

        The parameter's storage may be given up, before or after (``untyped_storage().resize_(0)``): the
        writer's stands in for it. From now on the parameter has a master of its own, also where it is FP32.

        Args:
            param: of this optimizer, Muon's or AdamW's.
            writer: see `muonloom.writers.Writer`; it takes the place of a former one of yours. The first
                master is made from what its weight was made from, else from the parameter's storage, where
                there is any.

        Raises:
            ValueError: it is not the optimizer's, or an engine's already; the writer writes another one, is
                not BF16 and masters are split, or cannot be given what is updated together; nothing was
                changed.
        """
        self._register({param: (None, writer)})

    def bind(self, engine: ExpertEngine) -> None:
        """Have `engine` write the device weights of the parameters that it holds.

        Raises:
            ValueError: it holds none of the optimizer's, another engine or writer has one of them, or see
                `register_writer`; nothing was changed.
        """
        if not hasattr(engine, "named_writers"):
            raise TypeError(
                complaint(
                    "engine",
                    got=f"a {type(engine).__name__}",
                    wanted="an expert engine",
                    remedy="See muonloom.ExpertEngine.",
                )
            )
        found = collect_writers([engine], self._names())
        if not found:
            raise ValueError(
                complaint(
                    "engine",
                    got=f"a {type(engine).__name__} that holds none of the optimizer's parameters",
                    wanted="one whose named_writers() yields some of them",
                    remedy="Build the optimizer with the model that the engine was attached to.",
                )
            )
        self._register({param: (engine, writer) for param, (_, writer) in found.items()})
        self._weights.bind(engine)

    def rebind(self, param: Tensor) -> None:
        """Accept that the device weight of `param` has moved on purpose; its values must not have changed.

        Raises:
            ValueError: `param` is not the optimizer's.
            StaleMasterError: the weight is another than its master says.
        """
        name = self._assignment(param).name
        refuse_released(self._released.values(), "rebind()")
        self._assembly.settle()
        self._weights.renew_writers()
        self._weights.rebind(param)
        self._weights.check({param: name})
        self._masters.doubt(param)
        self._masters.check(name, param, self.state.get(param, {}))

    def _names(self) -> dict[Tensor, str]:
        return {param: known.name for param, known in self._assignments.items()}

    def _bind_known(self, engine: ExpertEngine | None = None) -> None:
        """Bind `engine`, and what bound and installed ones hold of parameters that have no writer yet."""
        if engine is not None:
            self.bind(engine)
        found = self._claimed(None)
        fresh = {p: pair for p, pair in found.items() if self._weights.writer(p) is None}
        self._register(dict(fresh))
        for other, _ in fresh.values():
            self._weights.bind(other)

    def _claimed(self, engine: ExpertEngine | None) -> dict[Tensor, tuple[ExpertEngine, Writer]]:
        """Return the writers that `engine`, and bound and installed ones, have for its parameters."""
        engines = [] if engine is None or not hasattr(engine, "named_writers") else [engine]
        engines += [*self._weights.engines, *(handle.engine for handle in _installed)]
        return collect_writers(engines, self._names())

    def _register(self, pairs: Mapping[Tensor, tuple[ExpertEngine | None, Writer]]) -> None:
        """Register all of these writers, or none."""
        for param, (_, writer) in pairs.items():
            known = self._assignment(param)
            self._refuse_split(known.name, writer)
            if known.share is not None or is_dtensor(param):
                raise ValueError(
                    complaint(
                        known.name,
                        got=f"a {type(writer).__name__} for a parameter that several ranks update",
                        wanted="one that this rank updates whole",
                        remedy="Give engine= to Muon(...), or process_group=False to its group; keep it "
                        "out of FSDP by ignored_params=.",
                    )
                )
        refuse_released(self._released.values(), "a new writer")
        self._assembly.settle()
        self._assembly.finish_reading()
        had: dict[Tensor, Tensor] = {}
        for param in pairs:
            state = self.state.get(param, {})
            if "master_low" in state:
                self._weights.check({param: self._assignments[param].name})
            if state.keys() & set(MASTER_KEYS):
                had[param] = self._masters.whole(param, state)
        registered = self._weights.registered()
        try:
            with lasting():
                self._take_over(pairs, had)
        except BaseException:
            self._give_back(param for param in pairs if param not in had)
            self._weights.put_back(registered)
            raise

    def _take_over(
        self,
        pairs: Mapping[Tensor, tuple[ExpertEngine | None, Writer]],
        had: Mapping[Tensor, Tensor],
    ) -> None:
        """Register writers; make masters from what they have, or write weights from those that were."""
        for param, (engine, writer) in pairs.items():
            known = self._assignments[param]
            self._weights.register(param, writer, name=known.name, spec=known.spec, engine=engine)
        if pairs:
            self._current_engine()  # the plan refuses what does not fit
        for param in pairs:
            if param in had:
                self._masters.rewrite(param, had[param])
            else:
                self._masters.begin(self._assignments[param].name, param, self.state[param])

    def _give_back(self, params: Iterable[Tensor]) -> None:
        """Undo masters that were made when writers were registered: their sources are given out once."""
        for param in params:
            state = self.state.get(param, {})
            if "master_weight" in state:
                self._weights.return_source(param, state["master_weight"].to("cpu", copy=True))
            drop_master(state)

    def _refuse_split(self, name: str, writer: Writer) -> None:
        if self._assembly.splits_masters and not isinstance(writer, BFloat16Writer):
            raise ValueError(
                complaint(
                    name,
                    got=f'a {type(writer).__name__} and master_layout="split"',
                    wanted="a BFloat16Writer, whose weight is half of the master",
                    remedy='Use master_layout="full".',
                )
            )

    def _begin_step(self) -> None:
        """Tell the engines, and refuse weights that are not where they were."""
        refuse_released(self._released.values(), "step()")
        self._assembly.wait_for_weights()
        for engine in self._weights.engines:
            engine.before_step(self)
        self._weights.check(self._names())

    def _end_step(self, *, skipped: bool) -> None:
        for engine in self._weights.engines:
            engine.after_step(self, skipped)

    def _assignment(self, param: Tensor) -> Assignment:
        if param not in self._assignments:
            raise ValueError(
                complaint(
                    "param",
                    got=f"a tensor of shape {tuple(param.shape)} that is not the optimizer's",
                    wanted="one of its parameters",
                    remedy="Pass the very object that the optimizer was built with.",
                )
            )
        return self._assignments[param]

    def _chosen(self, params: Iterable[Tensor] | None) -> dict[Tensor, str]:
        """Return names of these parameters; None: of all."""
        if params is None:
            return self._names()
        if isinstance(params, Tensor | str):
            raise TypeError(
                complaint(
                    "params",
                    got=f"a {type(params).__name__}",
                    wanted="a list of parameters",
                    remedy="Put it into a list.",
                )
            )
        given: list[Any] = list(params)
        return {param: self._assignment(param).name for param in given}
