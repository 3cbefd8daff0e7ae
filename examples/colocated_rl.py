"""Reinforcement learning where training and generation take turns on one device.

Each cycle updates the policy on what was generated, gives the trainer's device memory back, loads the new
weights into a second copy of the model (the rollout engine), generates with it, and takes the memory again:

    update -> release -> export into the engine, generate -> resume

The policy is a small mixture of experts that learns to write vowels. Each cycle prints a line and checks
that weights came back bit for bit and that memory did not grow. Exit code 1 says that one of these failed.

    python examples/colocated_rl.py
    python examples/colocated_rl.py --experts float8
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import muonloom

VOWELS = torch.tensor([ord(letter) for letter in "aeiou"])
VOCABULARY = 128
BEGIN = 0

# What Python and the allocator take now and then; in 10 cycles a copy of the weights each would be more.
RESIDENT_SLACK = 8 << 20

HEADING = (
    f"{'cycle':>5} {'reward':>7} {'before':>9} {'released':>9} {'resumed':>9} {'exact':>6} {'resident':>9}"
    f" {'seconds':>8}   (MB of the trainer on the device; resident: all of the process)"
)


def build_model() -> Any:
    """Return a Qwen3-MoE of 1 million parameters, in BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=BEGIN,
        bos_token_id=BEGIN,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class RolloutEngine:
    """Generates text with its own copy of the model, which takes weights by the names that files have."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self._weights = dict(model.named_parameters())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor to its place as it comes; every element must come exactly once."""
        missing = {name: weight.numel() for name, weight in self._weights.items()}
        for name, tensor in weights:
            key, place = self._place(name)
            if place.shape != tensor.shape:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}")
            place.copy_(tensor)
            missing[key] -= tensor.numel()
        wrong = [name for name, count in missing.items() if count]
        if wrong:
            raise ValueError(f"{wrong[0]}: {missing[wrong[0]]} elements did not come")

    def _place(self, name: str) -> tuple[str, Tensor]:
        """Return the weight that `name` belongs to, and where in it: here experts are stacked."""
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            return name, self._weights[name]
        owner, expert, part = match[1], int(match[2]), match[3]
        key = f"{owner}.down_proj" if part == "down" else f"{owner}.gate_up_proj"
        place = self._weights[key][expert]
        return key, place if part == "down" else place.chunk(2)[part == "up"]

    def generate(self, *, num_samples: int, length: int) -> Tensor:
        """Return sampled tokens, (num_samples, 1 + length); the first of each is `BEGIN`."""
        prompt = torch.full((num_samples, 1), BEGIN)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        tokens: Tensor = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=length,
            max_new_tokens=length,
            **sampling,
        )
        return tokens


def rewards_of(tokens: Tensor) -> Tensor:
    """Return the share of vowels in each sample."""
    return torch.isin(tokens[:, 1:], VOWELS).float().mean(dim=1)


def policy_gradient(model: Any, tokens: Tensor, rewards: Tensor) -> None:
    """Leave the gradient of REINFORCE in `.grad`, with the mean reward as the baseline."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    logp = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(dim=1)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    (-(advantage * logp).mean()).backward()


class Trainer:
    """The policy and its optimizer."""

    def __init__(self, *, experts: str, lr: float) -> None:
        self.model = build_model().train()
        self._engine: Any = None
        if experts == "float8":
            from muonloom.experts import Float8Experts

            self._engine = Float8Experts.attach(self.model)
        self.optimizer = muonloom.Muon(
            muonloom.parameter_groups(self.model, muonloom.Layout.from_model(self.model)),
            lr=lr,
            adjust_lr_fn="match_rms_adamw",
            weight_decay=0.0,
            placement="host",
            engine=self._engine,
        )

    def update(self, tokens: Tensor, rewards: Tensor) -> None:
        """Take one step of the policy gradient."""
        policy_gradient(self.model, tokens, rewards)
        self.optimizer.step()

    def digest(self) -> str:
        """Return SHA-256 of all device weights: BF16 parameters, and FP8 data and scales."""
        total = hashlib.sha256()
        for tensor in self._device_weights():
            total.update(tensor.detach().contiguous().view(torch.uint8).numpy())
        return total.hexdigest()

    def _device_weights(self) -> Iterator[Tensor]:
        writers = dict(self._engine.named_writers()) if self._engine is not None else {}
        for param in self.model.parameters():
            yield from writers[param].tensors() if param in writers else [param]


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    return int(found[1]) * 1024 if found else 0


def device_bytes(memory: dict[str, int]) -> int:
    """Return what `Muon.memory` counts on the device."""
    return sum(count for place, count in memory.items() if place != "host_state")


def is_same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the very same weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Cycle(NamedTuple):
    """What one cycle gave.

    Attributes:
        memory: `Muon.memory` before release, while released, and after resume.
        exact: whether device weights came back as the very bytes that they were.
        resident: bytes of this process.
    """

    reward: float
    memory: dict[str, dict[str, int]]
    exact: bool
    resident: int
    seconds: float

    def __str__(self) -> str:
        megabytes = [f"{device_bytes(found) / 1e6:9.1f}" for found in self.memory.values()]
        exact = f"{'yes' if self.exact else 'NO':>6}"
        return (
            f"{self.reward:7.3f} {' '.join(megabytes)} {exact}"
            f" {self.resident / 1e6:9.1f} {self.seconds:8.2f}"
        )


def problems_of(cycles: list[Cycle]) -> Iterator[str]:
    """Yield what is wrong: weights that changed, memory that stayed or grew."""
    # The first release makes room on the host for what no master holds, and keeps it.
    first = {phase: dict(memory) for phase, memory in cycles[0].memory.items()}
    first["before"]["host_state"] = first["resumed"]["host_state"]
    for number, cycle in enumerate(cycles, 1):
        if not cycle.exact:
            yield f"cycle {number}: weights came back changed"
        if device_bytes(cycle.memory["released"]):
            yield f"cycle {number}: bytes stayed on the device: {cycle.memory['released']}"
        for phase, memory in cycle.memory.items():
            if number > 1 and memory != first[phase]:
                yield f"cycle {number}: {phase}: {memory}, at first {first[phase]}"
    resident = [cycle.resident for cycle in cycles]
    growth = max(resident[2:], default=0) - max(resident[:2])
    if growth > RESIDENT_SLACK:
        yield f"resident memory grew by {growth} bytes after the second cycle"


def run(*, cycles: int, experts: str, num_samples: int, length: int, lr: float) -> list[str]:
    """Run the cycles and print a line for each; return what went wrong."""
    torch.manual_seed(0)
    trainer, rollout = Trainer(experts=experts, lr=lr), RolloutEngine(build_model())
    model, optimizer = trainer.model, trainer.optimizer
    rollout.load(muonloom.export_weights(model, optimizer))
    tokens = rollout.generate(num_samples=num_samples, length=length)
    problems: list[str] = []
    done: list[Cycle] = []
    print(HEADING)
    for number in range(1, cycles + 1):
        began = time.perf_counter()
        rewards = rewards_of(tokens)
        trainer.update(tokens, rewards)
        digest, memory = trainer.digest(), {"before": optimizer.memory()}

        optimizer.release(model=model)
        memory["released"] = optimizer.memory()
        rollout.load(muonloom.export_weights(model, optimizer))
        tokens = rollout.generate(num_samples=num_samples, length=length)
        optimizer.resume()

        memory["resumed"] = optimizer.memory()
        cycle = Cycle(
            reward=float(rewards.mean()),
            memory=memory,
            exact=trainer.digest() == digest,
            resident=resident_bytes(),
            seconds=time.perf_counter() - began,
        )
        print(f"{number:5d} {cycle}", flush=True)
        done.append(cycle)
        if experts == "bfloat16" and not is_same(model, rollout.model):
            problems.append(f"cycle {number}: the engine has other weights than the trainer")
    return problems + list(problems_of(done))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--experts", choices=("bfloat16", "float8"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=32, help="texts a cycle")
    parser.add_argument("--length", type=int, default=12, help="tokens a text")
    parser.add_argument("--lr", type=float, default=1e-2)
    chosen = parser.parse_args(arguments)
    problems = run(
        cycles=chosen.cycles,
        experts=chosen.experts,
        num_samples=chosen.samples,
        length=chosen.length,
        lr=chosen.lr,
    )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices as small as these gain nothing by more
    sys.exit(main())
