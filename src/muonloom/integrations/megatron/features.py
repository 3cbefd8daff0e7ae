"""What of Megatron-Core the adapter needs: looked for by name, once, before anything of it is used."""

from __future__ import annotations

import importlib

from muonloom.errors import complaint

_WANTED = "megatron-core 0.19.x"
_FEATURES = {
    "megatron.core.optimizer": (
        "OptimizerConfig",
        "_get_param_groups",
        "get_standard_config_overrides",
    ),
    "megatron.core.optimizer.optimizer": (
        "FP32Optimizer",
        "copy_optimizer_param_metadata",
        "param_group_identifier_keys",
    ),
    "megatron.core.transformer.attention": ("Attention",),
    "megatron.core.transformer.mlp": ("MLP",),
    "megatron.core.transformer.module": ("MegatronModule",),
    "megatron.core.transformer.moe.experts": ("SequentialMLP", "TEGroupedMLP"),
    "megatron.core.transformer.moe.shared_experts": ("FusedSharedExpertMLP",),
    "megatron.core.utils": ("get_pg_rank", "get_pg_size"),
    "megatron.core.optimizer.emerging_optimizers": (
        "_EMERGING_OPTIMIZERS",
        "EmergingOptimizerEntry",
    ),
    "megatron.core.process_groups_config": ("ProcessGroupCollection",),
    "megatron.core.tensor_parallel": ("copy_tensor_model_parallel_attributes",),
    "megatron.core.dist_checkpointing.mapping": ("ShardedTensor", "ShardedTensorFactory"),
    "megatron.core.dist_checkpointing.optimizer": ("get_param_id_to_sharded_param_map",),
    "megatron.core.dist_checkpointing.dict_utils": ("nested_values",),
}


def require_features() -> None:
    """Raise an ImportError that says what is missing."""
    for module, names in _FEATURES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                complaint(
                    "megatron.core",
                    got=f"no {module} ({error})",
                    wanted=_WANTED,
                    remedy="pip install 'megatron-core>=0.19,<0.20'.",
                )
            ) from error
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            version = getattr(importlib.import_module("megatron.core"), "__version__", "unknown")
            raise ImportError(
                complaint(
                    "megatron.core",
                    got=f"version {version}, where {module} lacks {', '.join(missing)}",
                    wanted=_WANTED,
                    remedy="Install another version of megatron-core, or of muonloom.",
                )
            )
