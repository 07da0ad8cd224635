"""Text that a target writes itself, with the hidden states behind it, in shards on disk. Knows nothing of training."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from smcdecode.declare.method import Autoregressive
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.prompts import PromptLike, read_prompt
from smcdecode.sample import sample

__all__ = ["Corpus", "Lesson", "last_hidden", "whole"]

PROMPTS, SAMPLES, LENGTH = 4, 32, 96  # of a shard: prompts, continuations of each, most tokens of one
TOGETHER = 16  # sequences of a pass


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A prompt and what the target wrote behind it, with the states its laws of the written tokens came from."""

    tokens: Tensor  # (L,) int64
    hidden: Tensor  # (written tokens, d): the target's last hidden states before each of them


class Corpus:
    """Shards of lessons in a folder; shard i is a function of the target, the prompts, the seed and i.

    Args:
        folder: where they lie.
        p: the target, which writes.
        module: the target, whose hidden states are kept.
        prompts: what is continued, in turn.
        seed: of what is written.
    """

    def __init__(
        self, folder: Path, p: LanguageModel, module: PreTrainedModel, prompts: Sequence[PromptLike], seed: int
    ) -> None:
        self.folder, self.p, self.module, self.seed = folder, p, module, seed
        self.prompts = [list(read_prompt(prompt, p).tokens) for prompt in prompts]

    def read(self, tokens: int) -> Iterator[list[Lesson]]:
        """Shards of ``tokens`` written tokens in all, two at least: read where they are there, else written first."""
        number = written = 0
        while written < tokens or number < 2:
            path = self.folder / f"text-{number:05d}.safetensors"
            if not path.exists():
                self._write(path, number)
            lessons = _unpack(load_file(path))
            yield lessons
            written += sum(len(lesson.hidden) for lesson in lessons)
            number += 1

    def _write(self, path: Path, number: int) -> None:
        heads = [self.prompts[(number * PROMPTS + i) % len(self.prompts)] for i in range(PROMPTS)]
        method = Autoregressive(SAMPLES)
        texts = sample(self.p, heads, method=method, max_tokens=LENGTH, seed=self.seed + number, progress=False)
        rows = [(head, tail) for head, text in zip(heads, texts, strict=True) for tail in text.tokens]
        tokens = [torch.tensor([*head, *tail]) for head, tail in rows]
        starts = [len(head) for head, _ in rows]
        tensors = {
            "tokens": torch.cat(tokens).int(),
            "start": torch.tensor(starts),
            "end": torch.tensor([len(row) for row in tokens]),
            "hidden": torch.cat(self._hidden(tokens, starts)),
        }
        whole(path, lambda scratch: save_file(tensors, scratch))

    @torch.no_grad()
    def _hidden(self, tokens: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """The target's states before each written token of each sequence."""
        result = []
        for at in range(0, len(tokens), TOGETHER):
            states = last_hidden(self.module, tokens[at : at + TOGETHER])
            parts = zip(states, tokens[at : at + TOGETHER], starts[at : at + TOGETHER], strict=True)
            result += [row[start - 1 : len(text) - 1] for row, text, start in parts]
        return result


def _unpack(tensors: dict[str, Tensor]) -> list[Lesson]:
    ends, starts = tensors["end"].tolist(), tensors["start"].tolist()
    written = [end - start for start, end in zip(starts, ends, strict=True)]
    parts = zip(torch.split(tensors["tokens"].long(), ends), torch.split(tensors["hidden"], written), strict=True)
    return [Lesson(tokens, hidden) for tokens, hidden in parts]


def last_hidden(module: PreTrainedModel, tokens: Sequence[Tensor]) -> Tensor:
    """What a model's head reads, (n, L, d), of n sequences; those shorter than L are padded on the right."""
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
    hidden: Tensor = module.base_model(input_ids=padded, use_cache=False).last_hidden_state
    return hidden


def whole(path: Path, write: Callable[[str], object]) -> None:
    """Let ``write`` make a file that is there whole or not at all."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}", dir=path.parent)
    os.close(handle)
    try:
        write(scratch)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)
