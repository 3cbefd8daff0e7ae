"""A completion of a held-out prompt, to be read before and after training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from muonloom.train.data import Corpus


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt from the held-out text and what the model wrote after it."""

    prompt: str
    before: str
    after: str = ""


def choose_prompt(corpus: Corpus, length: int) -> Tensor:
    """Return int64 `(length,)`: the beginning of a line or so, from the middle of the held-out text."""
    tokens = corpus.held_out.tokens
    length = min(length, corpus.sequence_length, len(tokens) - 1)
    start = max(min(len(tokens) // 2, len(tokens) - length), 0)
    newline = corpus.tokenizer.encode("").tolist()
    for offset in range(start, min(start + 256, len(tokens) - length)):
        if [int(tokens[offset - 1])] == newline:
            start = offset
            break
    return torch.from_numpy(tokens[start : start + length].astype(np.int64))


@torch.no_grad()
def complete(
    model: nn.Module,
    prompt: Tensor,
    *,
    num_tokens: int,
    window: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> Tensor:
    """Return the `num_tokens` token numbers that the model writes after `prompt`, int64.

    Args:
        model: a causal LM; its mode is put back.
        prompt: int64 `(n,)`.
        num_tokens: how many to write.
        window: tokens of context the model sees, at most; as many as it was trained with.
        temperature: 0 takes the likeliest token; else the softmax is sampled.
        seed: of a generator of its own, so that the run's other draws do not move.
        device: the model's.
    """
    was_training = model.training
    model.eval()
    draw = torch.Generator().manual_seed(seed)
    tokens = prompt.clone()
    for _ in range(num_tokens):
        logits = model(input_ids=tokens[None, -window:].to(device), use_cache=False).logits
        scores = logits[0, -1].float().cpu()
        if temperature > 0:
            chances = torch.softmax(scores / temperature, dim=-1)
            following = torch.multinomial(chances, 1, generator=draw)
        else:
            following = scores.argmax(keepdim=True)
        tokens = torch.cat([tokens, following])
    model.train(was_training)
    return tokens[len(prompt) :]
