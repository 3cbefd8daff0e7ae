"""``config.optimizer = "muonloom"``: the optimizer that Megatron makes by name, and wraps itself.

Megatron's wrappers keep the FP32 masters, as parameters of their own, and do all of data parallelism
(`LayerWiseDistributedOptimizer` too). So this takes no part in either: it updates what it is left with.
`get_optimizer` does more: masters on the host, writers, work shared out by cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    EmergingOptimizerEntry,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from muonloom import Muon, Sharding
from muonloom.integrations.megatron.layout import describe
from muonloom.integrations.megatron.options import LAYOUT_OPTIONS, group_options, muon_options

_SCHEDULED = ("lr", "weight_decay")


def register(name: str = "muonloom", **options: Any) -> None:
    """Have ``config.optimizer = name`` make this optimizer in `get_megatron_optimizer`.

    Args:
        name: in `config`.
        options: of `get_optimizer`, but for process groups and overrides of groups.
    """

    def keywords(config: OptimizerConfig, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
        return {
            "config": config,
            "model_chunks": model_chunks,
            "pg_collection": pg_collection,
            "options": options,
        }

    _EMERGING_OPTIMIZERS[name] = EmergingOptimizerEntry(
        optimizer_cls=RegisteredMuon,
        init_state_fn=lambda optimizer, *_: optimizer.make_state(),
        config_to_kwargs=keywords,
        default_param_overrides={},  # what is no matrix is AdamW's, here too
    )


class RegisteredMuon(Optimizer):
    """A `muonloom.Muon` over the parameters that Megatron's wrapper puts into its groups.

    Args:
        params: Megatron's groups of model parameters.
        config: see `get_optimizer`.
        model_chunks: see there.
        pg_collection: see there.
        options: see there.
    """

    def __init__(
        self,
        params: Any,
        *,
        config: OptimizerConfig,
        model_chunks: Sequence[nn.Module],
        pg_collection: Any,
        options: dict[str, Any],
    ) -> None:
        layout_options = {k: v for k, v in options.items() if k in LAYOUT_OPTIONS}
        others = {k: v for k, v in options.items() if k not in LAYOUT_OPTIONS}
        self._options = muon_options(config, others)
        self._layout, self._described = describe(
            model_chunks, pg_collection=pg_collection, **layout_options
        )
        self._muon: Muon | None = None
        defaults = {key: self._options[key] for key in _SCHEDULED}
        groups = [{**group_options(group, config), "params": group["params"]} for group in params]
        super().__init__(groups, defaults)

    @property
    def muon(self) -> Muon:
        """The optimizer; made when it is first needed, once the wrapper has put its parameters in place."""
        if self._muon is None:
            known = {getattr(d.parameter, "main_param", d.parameter): d for d in self._described}
            for param in self._params():
                param.requires_grad_()  # Megatron's masters do not say that they are trained
            groups = [
                {**group, "params": [(known[p].name, p) for p in group["params"]], "index": index}
                for index, group in enumerate(self.param_groups)
                if group["params"]
            ]
            cut = {
                known[p].name: Sharding(process_group=known[p].group, dim=known[p].cut_dim or 0)
                for group in self.param_groups
                for p in group["params"]
                if known[p].cut_dim is not None
            }
            self._muon = Muon(
                groups,
                layout=self._layout,
                sharding=cut,
                process_group=False,
                step_group=dist.group.WORLD,
                **self._options,
            )
            self.state = self._muon.state
        for group in self._muon.param_groups:
            group.update({key: self.param_groups[group["index"]][key] for key in _SCHEDULED})
        return self._muon

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        return self.muon.step(closure)

    def make_state(self) -> None:
        """Have all state there is, zero before the first step."""
        for param in self._params():
            self.muon.own_state(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dictionary as torch's optimizers do."""
        super().load_state_dict(state_dict)
        loaded = {param: dict(self.state.get(param, {})) for param in self._params()}
        muon = self.muon
        muon.load_own_state({param: state for param, state in loaded.items() if state})
        self.state = muon.state

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]
