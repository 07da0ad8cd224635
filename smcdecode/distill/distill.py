"""Grow a small draft from a target, on disk and in steps that survive being killed. Ties the rooms of distillation.

In the draft's folder a folder ``work`` holds what the target wrote, in shards, and the state of the training. Each
file is there whole or not at all, and is a function of the call and of what was there before: the same call, made
again, goes on where the last one was killed, and ends with the same draft.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from smcdecode.distill.corpus import Corpus, Lesson, whole
from smcdecode.distill.loss import Agreement
from smcdecode.distill.seeds import seed_prompts
from smcdecode.distill.training import BATCH, Trainer, check_head, grow
from smcdecode.engine.load import Source, checkpoint, load
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.prompts import PromptLike
from smcdecode.errors import InvalidOption, PromptError

__all__ = ["distill"]

SAVE, REPORT = 20, 100  # steps between states saved, and between measurements


def distill(
    target: Source,
    out: str | Path,
    *,
    layers: int = 4,
    tokens: int = 1_000_000,
    passes: int = 4,
    prompts: Sequence[PromptLike] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Agreement:
    """Grow a small draft from a target, and save it as a checkpoint for :func:`smcdecode.load`.

    The draft is the target's first and last layers between its embeddings and its head, which are shared and frozen. It
    is trained to the target's whole next-token laws (forward KL at temperature 1; Zhou et al. 2024, "DistilSpec") on
    text that the target writes itself. A call that was killed goes on where it stopped when it is made again.

    Args:
        target: as for :func:`smcdecode.load`.
        out: folder of the draft; ``work`` in it keeps the text and the training's state, and may be deleted at the end.
        layers: of the draft.
        tokens: how many the target writes.
        passes: how often they are gone through.
        prompts: what the target continues; by default plain openings, and user messages if it has a chat template.
        seed: the same seed, the same draft.
        progress: show bars, and print measurements on the text held out; None shows bars on a terminal only.

    Returns:
        How well the draft agrees with the target, on text held out.

    Raises:
        InvalidOption: for values that mean nothing, or a folder where another draft grows.
        PromptError: the target has no tokenizer, and no prompts of token ids are given.
        UnsupportedModel: the target does more to its logits than multiply by its head.
    """
    for name, value in (("tokens", tokens), ("passes", passes)):
        if not isinstance(value, int) or value < 1:
            raise InvalidOption(f"{name} must be an integer ≥ 1; got {value!r}")
    module, tokenizer = checkpoint(target)
    check_head(module)
    draft = grow(module, layers)
    p = load((module, tokenizer), batch_invariant=False)
    prompts = _prompts(p, seed) if prompts is None else prompts
    out = Path(out)
    _claim(out / "work", {"layers": layers, "seed": seed})
    test, train = _written(Corpus(out / "work", p, module, prompts, seed), tokens, progress)
    trainer = Trainer(draft, train, test, math.ceil(passes * len(train) / BATCH))
    agreement = _train(trainer, out / "work" / "state.pt", progress)
    draft.to(module.dtype).save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    return agreement


def _prompts(p: LanguageModel, seed: int) -> Sequence[PromptLike]:
    if p.tokenizer is None:
        raise PromptError(f"{p.name} has no tokenizer: give prompts=[…], lists of token ids for it to continue")
    return seed_prompts(bool(getattr(p.tokenizer, "chat_template", None)), seed)


def _claim(work: Path, settings: dict[str, Any]) -> None:
    """Note whose work this folder holds.

    Raises:
        InvalidOption: if it holds another's.
    """
    work.mkdir(parents=True, exist_ok=True)
    note = work / "settings.json"
    if note.exists() and (found := json.loads(note.read_text())) != settings:
        raise InvalidOption(
            f"{work} holds a distillation with {found}, not {settings}: delete it or name another folder"
        )
    whole(note, lambda scratch: Path(scratch).write_text(json.dumps(settings)))


def _written(corpus: Corpus, tokens: int, progress: bool | None) -> tuple[list[Lesson], list[Lesson]]:
    """The text held out, and the text to learn from."""
    shards: list[list[Lesson]] = []
    with _bar(tokens, "tok", "text", progress) as bar:
        for lessons in corpus.read(tokens):
            shards.append(lessons)
            bar.update(sum(len(lesson.hidden) for lesson in lessons))
    return shards[0], [lesson for shard in shards[1:] for lesson in shard]


def _train(trainer: Trainer, path: Path, progress: bool | None) -> Agreement:
    """Train from the state that is there, if any, to the end."""
    if path.exists():
        trainer.restore(torch.load(path, weights_only=True))
    with _bar(trainer.steps, "step", "training", progress) as bar:
        bar.update(trainer.step)
        for loss in trainer.run():
            bar.update()
            bar.set_postfix({"KL": f"{loss:.3f}"}, refresh=False)
            if trainer.step % SAVE == 0 or trainer.step == trainer.steps:
                whole(path, lambda scratch: torch.save(trainer.state(), scratch))
            if trainer.step % REPORT == 0 and progress is not False:
                tqdm.write(f"step {trainer.step} of {trainer.steps}, held out: {trainer.measure()}", file=sys.stderr)
    return trainer.measure()


def _bar(total: int, unit: str, what: str, progress: bool | None) -> "tqdm[Any]":
    return tqdm(total=total, unit=unit, desc=what, disable=None if progress is None else not progress)
