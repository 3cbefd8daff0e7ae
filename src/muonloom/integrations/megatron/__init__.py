"""muonloom as an optimizer of Megatron-Core 0.19."""

from muonloom.integrations.megatron.features import require_features

require_features()

from muonloom.integrations.megatron.adapter import MegatronMuon, get_optimizer  # noqa: E402
from muonloom.integrations.megatron.registry import register  # noqa: E402

__all__ = ["MegatronMuon", "get_optimizer", "register"]
