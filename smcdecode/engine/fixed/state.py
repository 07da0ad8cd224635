"""What G lanes of N particles hold from cycle to cycle, in buffers that stay where they are. Knows no model, no law.

The first lanes of a state are a state as well, over the same memory: a cycle of few lanes runs on those alone.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from smcdecode_kernels.laws import Key
from smcdecode_kernels.pages import Pages

__all__ = ["Report", "State"]

_INTS = ("length", "told", "cached", "lag", "finished", "dead", "origin")  # columns before the tokens
_LANES = ("log_z", "ess", "chi2", "first_log_z", "resamplings", "running", "resampled", "done", "judged", "accepted",
          "copied", "writing")  # fmt: skip
_NUMBERS = ("log_z", "first_log_z", "resamplings", "alpha", "temperature", "strictness", "threshold")
_COUNTS = ("seed", "cycle", "cap", "prompt")
_SLOTS = ("log_w", "log_p", "ancestor", "origin", "length", "count", "dead")


@dataclasses.dataclass(frozen=True)
class State:
    """S = G · N slots, the slots of a lane together; on one device.

    Attributes:
        ints: (S, 7 + T + 1) int64: columns named as the properties, then tokens, the last of which is never read.
        floats: (S, 1 + T) float64: log p of the own tokens, then the log-weights owed for each of them.
        pages: of each slot's whole text, its prompt's pages first.
        log_w: (G, N) float64, since the last resampling.
        log_z, first_log_z, resamplings, alpha, temperature, strictness, threshold: (G,) float64, as in ``Slots`` and
            ``infer.smc``; ``first_log_z`` is the log-weight with which particles began.
        seed, cycle, cap, prompt: (G,) int64; ``prompt`` is its length.
        running: (G,) bool.
        report: (G, …) float64, what the host reads of a cycle, see :class:`Report`.
    """

    ints: Tensor
    floats: Tensor
    pages: Pages
    log_w: Tensor
    log_z: Tensor
    first_log_z: Tensor
    resamplings: Tensor
    alpha: Tensor
    temperature: Tensor
    strictness: Tensor
    threshold: Tensor
    seed: Tensor
    cycle: Tensor
    cap: Tensor
    prompt: Tensor
    running: Tensor
    report: Tensor

    @classmethod
    def create(
        cls, lanes: int, particles: int, *, block: int, max_tokens: int, width: int, pages: int, device: torch.device
    ) -> "State":
        """No request, and no page but the null page.

        Args:
            lanes: G.
            particles: N.
            block: K, drafted tokens a cycle.
            max_tokens: T, of the longest continuation.
            width: pages of the longest text.
            pages: the largest page number.
            device: where it lies.
        """
        S = lanes * particles
        ints = torch.zeros(S, len(_INTS) + max_tokens + 1, dtype=torch.int64, device=device)
        floats = torch.zeros(S, 1 + max_tokens, dtype=torch.float64, device=device)
        ints[:, _INTS.index("finished")].fill_(1)
        table = Pages.create(S, width, pages, device)
        table.left.zero_()
        wide = len(_LANES) + particles * (len(_SLOTS) + block + 1)
        numbers = dict.fromkeys(_NUMBERS, floats) | dict.fromkeys(_COUNTS, ints)
        return cls(
            ints=ints, floats=floats, pages=table, log_w=floats.new_zeros(lanes, particles),
            running=torch.zeros(lanes, dtype=torch.bool, device=device), report=floats.new_zeros(lanes, wide),
            **{name: like.new_zeros(lanes) for name, like in numbers.items()},
        )  # fmt: skip

    def first(self, lanes: int) -> "State":
        """The state of the first lanes, over the same memory."""
        S = lanes * self.particles
        pages = dataclasses.replace(self.pages, rows=self.pages.rows[:S], used=self.pages.used[:S])
        own = {f.name: getattr(self, f.name)[:lanes] for f in dataclasses.fields(self)[3:]}
        return dataclasses.replace(self, ints=self.ints[:S], floats=self.floats[:S], pages=pages, **own)

    # ---- shapes

    @property
    def lanes(self) -> int:
        """Lanes."""
        return len(self.log_w)

    @property
    def particles(self) -> int:
        """Particles of a lane."""
        return self.log_w.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.ints.device

    # ---- columns, as views: (S,) each

    @property
    def length(self) -> Tensor:
        """Own tokens."""
        return self.ints[:, 0]

    @property
    def told(self) -> Tensor:
        """Own tokens that reports have told of."""
        return self.ints[:, 1]

    @property
    def cached(self) -> Tensor:
        """Own tokens whose keys and values the target has."""
        return self.ints[:, 2]

    @property
    def lag(self) -> Tensor:
        """Own tokens the draft has not read: 1 or 2."""
        return self.ints[:, 3]

    @property
    def finished(self) -> Tensor:
        """1 where a text is complete or dead: it writes no more."""
        return self.ints[:, 4]

    @property
    def dead(self) -> Tensor:
        """1 where the weight is zero."""
        return self.ints[:, 5]

    @property
    def origin(self) -> Tensor:
        """The first-cycle ancestor, by its place in the lane."""
        return self.ints[:, 6]

    @property
    def tokens(self) -> Tensor:
        """(S, T + 1), own tokens; the last column takes what is thrown away."""
        return self.ints[:, len(_INTS) :]

    @property
    def log_p(self) -> Tensor:
        """The log p of the own tokens."""
        return self.floats[:, 0]

    @property
    def owed(self) -> Tensor:
        """(S, T), log-weights of own tokens that are not counted yet."""
        return self.floats[:, 1:]

    # ---- what follows from them

    def of_slots(self, lanes: Tensor) -> Tensor:
        """A number of each lane, for its slots: (G,) → (S,), side by side in memory as kernels read them."""
        return lanes[:, None].expand(self.lanes, self.particles).contiguous().view(-1)

    @functools.cached_property
    def place(self) -> Tensor:
        """The place of each slot in its lane: (S,) int64."""
        return torch.arange(self.particles, device=self.device).repeat(self.lanes)

    def key(self, place: int, stream: int) -> Key:
        """What makes a uniform for each slot, see ``Slots.uniform``."""
        seed, cycle = self.of_slots(self.seed), self.of_slots(self.cycle)
        return Key(seed, self.place, cycle, torch.full_like(cycle, place), stream)

    def last(self) -> Tensor:
        """The last own token of each slot, (S,) int64; any where there is none."""
        return self.tokens.gather(1, (self.length - 1).clamp(min=0)[:, None])[:, 0]

    def put(self, place: Tensor, tokens: Tensor, kept: Tensor) -> None:
        """Write tokens (S, n) to places (S, n) of the own tokens, where (S, n) bool says so."""
        spare = self.tokens.shape[1] - 1
        self.tokens.scatter_(1, place.clamp(max=spare).masked_fill(~kept, spare), tokens)

    def close(self, lanes: Tensor) -> Tensor:
        """Lanes where (G,) bool is true run no more: (S,) bool, their slots, whose pages may be cleared."""
        self.running.masked_fill_(lanes, False)
        slots = self.of_slots(lanes)
        self.finished.masked_fill_(slots, 1)
        return slots

    def write_report(self, lanes: dict[str, Tensor], slots: dict[str, Tensor], written: Tensor) -> None:
        """Fill ``report``: numbers of lanes (G,), numbers of slots (S,), and the tokens (S, K + 1) they wrote."""
        columns = [lanes[name].double()[:, None] for name in _LANES]
        rows = torch.cat([torch.stack([slots[name].double() for name in _SLOTS], 1), written.double()], 1)
        self.report.copy_(torch.cat([*columns, rows.view(self.lanes, -1)], 1))


class Report:
    """What one cycle did, on the host: one number a lane or (G, N) numbers a slot, by name.

    Weights and the like are those before resampling, as in :class:`~smcdecode.infer.smc.Step`.
    """

    def __init__(self, numbers: Tensor, particles: int) -> None:
        lanes = dict(zip(_LANES, numbers[:, : len(_LANES)].unbind(1), strict=True))
        rows = numbers[:, len(_LANES) :].view(len(numbers), particles, -1)
        slots = dict(zip(_SLOTS, rows[..., : len(_SLOTS)].unbind(-1), strict=True))
        self.log_z, self.ess, self.chi2 = lanes["log_z"], lanes["ess"], lanes["chi2"]  # (G,) float64
        self.first_log_z, self.resamplings = lanes["first_log_z"], lanes["resamplings"]
        self.running, self.resampled, self.done = (lanes[name].bool() for name in ("running", "resampled", "done"))
        self.judged, self.accepted, self.copied, self.writing = (
            int(lanes[name].sum()) for name in ("judged", "accepted", "copied", "writing")
        )
        self.log_w, self.log_p = slots["log_w"], slots["log_p"]  # (G, N) float64
        self.ancestors, self.origin, self.length, self.count = (
            slots[name].long() for name in ("ancestor", "origin", "length", "count")
        )
        self.dead = slots["dead"].bool()
        self.written = rows[..., len(_SLOTS) :].long()  # (G, N, K + 1), of which the first ``count``
