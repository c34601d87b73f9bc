"""Answers of the model to held-out conversations, shown at each evaluation.

All conversations are one batch, padded at the right, and every token takes one forward over the whole batch: no
key-value cache is kept, so a model of any kind and stage answers. All ranks make the same number of forwards, because
each of them gathers parameters.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dzero.config import RunConfig
from dzero.data.chats import ChatCorpus
from dzero.data.mixture import MixedCorpus
from dzero.parallel.tiling.loss import head_of

DEFAULT = 2


def answers_of(config: RunConfig) -> int:
    """Return the number of conversations that a run answers at each evaluation."""
    if config.train.answers is not None:
        return config.train.answers
    mesh = config.mesh
    answers = config.data.kind == "chat" and config.offload.param == "device" and mesh.inner == 1
    return DEFAULT if answers else 0


@torch.no_grad()
def answer(
    model: nn.Module, corpus: ChatCorpus | MixedCorpus, count: int, tokens: int, device: torch.device
) -> list[str]:
    """Return one line for each of `count` held-out conversations, with at most `tokens` tokens of the likeliest answer.

    All ranks call this, with the model in evaluation.
    """
    prompts = corpus.prompts(count, tokens)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    batch = torch.zeros(len(prompts), int(lengths.max()) + tokens, dtype=torch.int64, device=device)
    for row, prompt in zip(batch, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt.astype("int64"))
    rows = torch.arange(len(prompts), device=device)
    longest, head, last = int(lengths.max()), head_of(model), lengths - 1

    def of_last(_: nn.Module, features: tuple[Tensor]) -> Tensor:
        """Keep the features of each last token, so that logits are [conversations, 1, vocabulary]."""
        return features[0][rows, last].unsqueeze(1)

    hook = nullcontext() if head is None else head.register_forward_pre_hook(of_last)
    with hook:
        for made in range(tokens):
            logits = model(batch[:, : longest + made])
            places = 0 if logits.shape[1] == 1 else last
            batch[rows, last + 1] = logits[rows, places].argmax(-1)
            last = last + 1
    return [
        corpus.shown(prompt, found[len(prompt) : len(prompt) + tokens].cpu().numpy())
        for prompt, found in zip(prompts, batch, strict=True)
    ]
