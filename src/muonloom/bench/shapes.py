"""The shapes that are measured, and the published models that they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

MoeShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """A batch of equal matrices.

    Attributes:
        count: matrices.
        rows: of each.
        columns: of each.
        source: the published shape that it stands for.
        goal: least ratio of looped ``torch.optim.Muon``'s time to ours that the project aims at.
        bound: the ratio at which our products would run at the GEMM's own speed, on the CPU with BF16
            instructions that the goals were set on.
    """

    count: int
    rows: int
    columns: int
    source: str = ""
    goal: float | None = None
    bound: str = ""

    @property
    def name(self) -> str:
        """``64x192x1536``, or ``2048x2048`` for a single matrix."""
        sides = f"{self.rows}x{self.columns}"
        return sides if self.count == 1 else f"{self.count}x{sides}"


BATCHES = (
    BatchShape(
        count=64,
        rows=64,
        columns=512,
        source="64 query heads of 64 rows (GPT-OSS), hidden size 2880 scaled to 512",
        goal=3.3,
        bound="4.2",
    ),
    BatchShape(
        count=64,
        rows=192,
        columns=1536,
        source="q_b_proj of Kimi K2, one head a matrix: 64 heads of 128 + 64 rows, q_lora_rank 1536",
        goal=1.6,
        bound="1.7-1.85",
    ),
    BatchShape(
        count=64,
        rows=256,
        columns=768,
        source="one projection of 4 layers of 16 experts: GLM-5's 2048 x 6144 with both sides / 8",
        goal=1.28,
        bound="1.33",
    ),
    BatchShape(
        count=1, rows=4096, columns=1024, source="MLP of GPT-2 medium", goal=1.75, bound="1.9"
    ),
    BatchShape(
        count=1,
        rows=2048,
        columns=2048,
        source="attention projections of OLMoE-1B-7B",
        goal=1.25,
        bound="1.33",
    ),
)

QUICK_BATCHES = (
    BatchShape(count=4, rows=16, columns=64, source="tiny, for tests"),
    BatchShape(count=1, rows=48, columns=32, source="tiny, for tests"),
)


@dataclass(frozen=True, kw_only=True)
class MoeSize:
    """A mixture-of-experts transformer with multi-head latent attention: its sizes.

    The default is GLM-5 (``glm_moe_dsa``) with hidden size, LoRA ranks and expert width / 8, heads
    64 -> 8 with their own sizes kept, routed experts 256 -> 16, layers 78 -> 4, and neither indexer nor
    shared expert.
    """

    model_type: str = "glm_moe_dsa"
    layers: int = 4
    hidden: int = 768
    heads: int = 8
    q_lora: int = 256
    kv_lora: int = 64
    nope: int = 192
    rope: int = 64
    value: int = 256
    experts: int = 16
    expert_width: int = 256

    def parameters(self) -> MoeShapes:
        """Return the matrices of all layers as a checkpoint of that family names and shapes them."""
        shapes: MoeShapes = {}
        for layer in range(self.layers):
            attention, experts = (
                f"model.layers.{layer}.self_attn",
                f"model.layers.{layer}.mlp.experts",
            )
            shapes |= {
                f"{attention}.q_a_proj.weight": (self.q_lora, self.hidden),
                f"{attention}.q_b_proj.weight": (
                    self.heads * (self.nope + self.rope),
                    self.q_lora,
                ),
                f"{attention}.kv_a_proj_with_mqa.weight": (self.kv_lora + self.rope, self.hidden),
                f"{attention}.kv_b_proj.weight": (
                    self.heads * (self.nope + self.value),
                    self.kv_lora,
                ),
                f"{attention}.o_proj.weight": (self.hidden, self.heads * self.value),
                f"{experts}.gate_up_proj": (self.experts, 2 * self.expert_width, self.hidden),
                f"{experts}.down_proj": (self.experts, self.hidden, self.expert_width),
            }
        return shapes

    def with_layers(self, layers: int) -> MoeSize:
        """Return the same model with another depth."""
        return replace(self, layers=layers)

    def config(self) -> SimpleNamespace:
        """Return what a layout reads of this family's configuration."""
        return SimpleNamespace(
            model_type=self.model_type,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            q_lora_rank=self.q_lora,
            kv_lora_rank=self.kv_lora,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.value,
        )


MOE = MoeSize()
QUICK_MOE = MoeSize(
    layers=2,
    hidden=32,
    heads=2,
    q_lora=16,
    kv_lora=8,
    nope=8,
    rope=4,
    value=8,
    experts=3,
    expert_width=16,
)

GLM5_QUARTER = MoeSize(
    hidden=384, heads=64, q_lora=512, kv_lora=128, nope=48, rope=16, value=64, expert_width=128
)
"""GLM-5 with its 64 heads, each head dimension and LoRA rank / 4, hidden size (6144) and expert width
(2048) / 16, 16 experts of 256, 4 layers of 78."""

DEEPSEEK_QUARTER = MoeSize(
    model_type="deepseek_v3",
    hidden=448,
    heads=128,
    q_lora=384,
    kv_lora=128,
    nope=32,
    rope=16,
    value=32,
    expert_width=128,
)
"""DeepSeek-V3 likewise: 128 heads of 128 + 64 rows and 128 values, ranks 1536 and 512, hidden size 7168."""

SPLIT_MODELS = {"GLM-5 / 4": GLM5_QUARTER, "DeepSeek-V3 / 4": DEEPSEEK_QUARTER}

QUICK_SPLIT = MoeSize(
    layers=2,
    hidden=24,
    heads=16,
    q_lora=32,
    kv_lora=8,
    nope=3,
    rope=1,
    value=4,
    experts=2,
    expert_width=12,
)

COUNTED_SPLIT = MoeSize(
    hidden=96,
    heads=64,
    q_lora=32,
    kv_lora=8,
    nope=3,
    rope=1,
    value=4,
    experts=4,
    expert_width=32,
)
"""GLM-5 with every size but the heads / 64: 48 layers of it stay below the limit of a batch."""
