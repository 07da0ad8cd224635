"""A job from rows to a folder of answers: what is missing is run, once each. Knows no engine and no Ray."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from smcdecode.integrations.batch.rows import Row
from smcdecode.integrations.batch.shards import Shards

__all__ = ["Source", "Tally", "run"]

Source = Callable[[Sequence[Row]], Iterable[Mapping[str, Any]]]
"""Answers some rows, in any order; a row's answer may come again."""


@dataclasses.dataclass
class Tally:
    """What became of a job's prompts."""

    before: int = 0  # answered when the job began
    answered: int = 0
    without_text: int = 0  # every particle died
    refused: int = 0  # could not be served
    first_refusal: str | None = None
    tokens: int = 0  # of the answers written now

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count an answer."""
        if answer.get("finish_reason") is None:
            self.refused += 1
            self.first_refusal = self.first_refusal or f"{answer['id']}: {answer['error']}"
        elif answer["error"] is not None:
            self.without_text += 1
        else:
            self.answered += 1
        self.tokens += answer.get("completion_tokens") or 0

    def __str__(self) -> str:
        told = [f"{self.answered} answered"]
        told += [f"{self.before} answered before"] if self.before else []
        told += [f"{self.without_text} without survivors"] if self.without_text else []
        told += [f"{self.refused} could not be served, the first {self.first_refusal}"] if self.refused else []
        return "; ".join(told)


def run(rows: Sequence[Row], source: Source, shards: Shards, *, progress: bool | None = None) -> Tally:
    """Have the rows that are not answered yet answered, and write each answer as it comes.

    Args:
        rows: all rows of the job.
        source: answers them.
        shards: where the answers go.
        progress: show a bar of prompts, with tokens a second; None shows it on a terminal.

    Raises:
        OutputError: an answer cannot be written.
    """
    left = [row for row in rows if row.id not in shards.done]
    tally = Tally(before=len(rows) - len(left))
    if left:
        for answer in _once(source(left), shards, _bar(len(rows), tally, progress), tally):
            shards.write(answer)
    assert len(shards.done) == len(rows), "a source answers every row"
    return tally


def _bar(total: int, tally: Tally, progress: bool | None) -> "tqdm[Any]":
    hidden = None if progress is None else not progress
    return tqdm(total=total, initial=tally.before, unit="prompt", disable=hidden)


def _once(
    answers: Iterable[Mapping[str, Any]], shards: Shards, bar: "tqdm[Any]", tally: Tally
) -> Iterator[Mapping[str, Any]]:
    """Answers to prompts that have none yet, counted when they are written."""
    with bar:
        for answer in answers:
            if answer["id"] in shards.done:
                continue
            yield answer
            tally.add(answer)
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tally.tokens / max(seconds, 1e-9):.0f} tok/s", refresh=False)
            bar.update()
