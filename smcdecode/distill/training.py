"""A small draft grown from a target and trained to its laws. Knows networks and lessons; no files, no particles."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smcdecode.distill.corpus import TOGETHER, Lesson, last_hidden
from smcdecode.distill.loss import Agreement, compare, divergence, subset
from smcdecode.engine.layers import check_count, keep_layers, layers_of
from smcdecode.errors import UnsupportedModel

__all__ = ["BATCH", "Trainer", "check_head", "grow"]

BATCH, RATE, WARM, DECAY, CLIP = 8, 1e-3, 0.05, 0.01, 1.0  # sequences a step; AdamW's numbers
LIKELY, OTHERS = 6144, 2048  # ids a step looks at
TESTED = 512  # positions where whole laws are compared


def check_head(module: PreTrainedModel) -> None:
    """Refuse a model whose logits are more than its head's product with the last hidden state.

    Raises:
        UnsupportedModel: naming the difference.
    """
    tokens = torch.arange(4)
    with torch.no_grad():
        plain = last_hidden(module, [tokens]) @ module.get_output_embeddings().weight.T
        if not torch.allclose(plain, module(input_ids=tokens[None]).logits, rtol=0.05, atol=0.05):
            raise UnsupportedModel(
                f"{type(module).__name__} does more to its logits than multiply by its head (a bias, a scale, a cap): "
                "distillation would train towards another law"
            )


def grow(module: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A draft of a target's first and last layers: these and its norms are float32 copies, the rest shared and frozen.

    Raises:
        InvalidOption: unless 1 ≤ layers < the target's.
        UnsupportedModel: if the target does not keep its layers in one list.
    """
    depth = len(layers_of(module)[1])
    check_count(layers, depth, type(module).__name__)
    first = (layers + 1) // 2
    draft = keep_layers(module, [*range(first), *range(depth - layers + first, depth)])
    ends = (draft.get_input_embeddings(), draft.get_output_embeddings())
    frozen = {id(end.weight) for end in ends}
    for part in draft.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in frozen:
                setattr(part, name, nn.Parameter(parameter.detach().float().clone()))
    for end in ends:
        end.weight.requires_grad_(False)
    return draft.train()


class Trainer:
    """AdamW on a draft's layers. A step is a function of its number and of the state it finds."""

    def __init__(self, draft: PreTrainedModel, train: Sequence[Lesson], test: Sequence[Lesson], steps: int) -> None:
        self.draft, self.train, self.test, self.steps, self.step = draft, train, test, steps, 0
        self.head: Tensor = draft.get_output_embeddings().weight
        self.trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.AdamW(self.trained.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)
        seen = torch.cat([lesson.tokens for lesson in train])
        self.frequency = torch.bincount(seen, minlength=len(self.head)).float()

    def run(self) -> Iterator[float]:
        """Train to the end, yielding each step's loss in nats."""
        while self.step < self.steps:
            for group in self.optimiser.param_groups:
                group["lr"] = RATE * self._pace()
            loss = self._loss(self._batch())
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.trained.values(), CLIP)
            self.optimiser.step()
            self.step += 1
            yield loss.item()

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        weights = {name: p.detach() for name, p in self.trained.items()}
        return {"step": self.step, "weights": weights, "optimiser": self.optimiser.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self.step = state["step"]
        self.optimiser.load_state_dict(state["optimiser"])
        for name, p in self.trained.items():
            p.copy_(state["weights"][name])

    def _pace(self) -> float:
        """Share of the learning rate at this step: a short rise, then down as a cosine."""
        done = self.step / self.steps
        return min(1.0, (self.step + 1) / (WARM * self.steps)) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))

    def _batch(self) -> list[Lesson]:
        """The step's lessons: a walk through all of them, in a new order each time round."""
        places = [divmod(i, len(self.train)) for i in range(self.step * BATCH, (self.step + 1) * BATCH)]
        orders = {round_: _order(len(self.train), round_) for round_, _ in places}
        return [self.train[orders[round_][place]] for round_, place in places]

    def _states(self, batch: Sequence[Lesson]) -> tuple[Tensor, Tensor]:
        """The draft's and the target's hidden states before each written token, (n, d) each."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.head.dtype == torch.bfloat16):
            hidden = last_hidden(self.draft, [lesson.tokens for lesson in batch])
        own = [row[len(x.tokens) - len(x.hidden) - 1 : len(x.tokens) - 1] for row, x in zip(hidden, batch, strict=True)]
        return torch.cat(own), torch.cat([lesson.hidden for lesson in batch])

    def _loss(self, batch: Sequence[Lesson]) -> Tensor:
        ids, log_share = subset(self.frequency, LIKELY, OTHERS, torch.Generator().manual_seed(self.step))
        return divergence(*self._states(batch), self.head.detach()[ids], log_share)

    @torch.no_grad()
    def measure(self) -> Agreement:
        """Agreement on some positions of the text held out, over the whole vocabulary."""
        batches = [self.test[at : at + TOGETHER] for at in range(0, len(self.test), TOGETHER)]
        states = list(zip(*map(self._states, batches), strict=True))
        mine, its = torch.cat(states[0]), torch.cat(states[1])
        at = torch.linspace(0, len(mine) - 1, min(TESTED, len(mine))).long()
        numbers = [compare(self._law(its[rows]), self._law(mine[rows])) for rows in torch.split(at, TOGETHER)]
        return Agreement.of(torch.cat(numbers))

    def _law(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.head.dtype) @ self.head.T).float().log_softmax(-1)


def _order(n: int, round_: int) -> list[int]:
    order = list(range(n))
    random.Random(round_).shuffle(order)
    return order
