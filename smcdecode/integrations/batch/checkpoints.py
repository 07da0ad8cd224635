"""The parts of an engine, named so that they can be sent to other processes: checkpoints, numbers, potentials."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import VERBS
from smcdecode.engine.load import load
from smcdecode.errors import InvalidOption
from smcdecode.integrations.batch.answering import Parts

__all__ = ["Checkpoints"]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Loads its parts where it is called; see ``smcdecode batch --help``."""

    target: str
    draft: str | None = None
    particles: int | Literal["auto"] = 8
    block: int | Literal["auto"] = 4
    strictness: float = 0.2
    potentials: tuple[str, ...] = ()  # each module:name, or file.py:name
    device: str | None = None
    parallel: bool = False  # the target is split over the ranks of this process's group

    def __call__(self) -> Parts:
        """Load them.

        Raises:
            InvalidOption, UnsupportedModel: one of them cannot be had; the message names it.
        """
        potentials = [_potential(place) for place in self.potentials]
        p = load(self.target, device=self.device, parallel=self.parallel)
        q = load(self.draft, device=self.device) if self.draft else None
        proposal = Draft(q, self.block, strictness=self.strictness) if q else Local()
        return Parts(p, SMC(proposal, self.particles), potentials)


def _potential(place: str) -> Any:
    """The potential at ``module:name`` or ``file.py:name``."""
    where, _, name = place.rpartition(":")
    try:
        psi = getattr(_module(where), name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise InvalidOption(f"no potential at {place!r}: {error}; say module:name, or file.py:name") from error
    missing = [verb for verb in VERBS if not callable(getattr(psi, verb, None))]
    if missing:
        raise InvalidOption(f"{place!r} is no potential: it lacks {', '.join(missing)}; make it one by @smc.potential")
    return psi


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
