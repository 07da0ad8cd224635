"""Knows what a potential ψ is, how potentials multiply, and how one is asked for its values; knows no model.

A potential weighs continuations: the target is ``π(x) ∝ p(x)^α · Ψ(x)``, equation (1), and along the way
``γ_t = p(x_1:t)^α · ψ_t(x_1:t)``. Everything is said in logarithms: ``log ψ = 0`` leaves a text as it is,
``log ψ = −inf`` forbids it.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from smcdecode.errors import InvalidWeight, PotentialError, SMCDecodeError
from smcdecode.potentials.text import Ids, IdsRead, Prompt, TextRead, shorten
from smcdecode.potentials.vocabulary import Vocabulary
from smcdecode_kernels.reference import pack_bits, unpack_bits

__all__ = [
    "BasePotential",
    "Potential",
    "Product",
    "Prompt",
    "allowed",
    "allowed_words",
    "evaluate",
    "masks",
]

State = Any  # what a potential remembers of one continuation; its own business


@runtime_checkable
class Potential(Protocol):
    """What the engine asks of a potential. ``check_potential`` tests an implementation against this contract."""

    @property
    def name(self) -> str:
        """What reports and messages call it; an attribute will do."""
        ...

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> State:
        """The state of the empty continuation of ``prompt``."""
        ...

    def advance(self, state: State, tokens: Sequence[int]) -> State:
        """The state after ``tokens``, a block of ids without EOS. ``state`` is consumed: it may be changed in place."""
        ...

    def fork(self, state: State) -> State:
        """An independent copy of ``state``."""
        ...

    def log_psi(self, states: Sequence[State], complete: Sequence[bool]) -> Sequence[float]:
        """``log ψ_t`` of each state, or ``log Ψ`` where it is ``complete``: ended by EOS, or at the length cap.

        Each value depends on its own state only, never on the others of the batch; asking changes no state.
        """
        ...

    def mask(self, states: Sequence[State]) -> torch.Tensor | None:
        """The tokens that may follow each state, EOS ids where it may end; None: all of them.

        Either ``(n, V)`` bool, or the same packed: ``(n, ⌈V/32⌉)`` int32, token i at bit ``i mod 32`` of word
        ``i div 32``. A token that is not allowed has ``ψ = 0`` after it.
        """
        ...


class BasePotential(ABC):
    """A potential in a few lines: derive from it and write ``log_psi``.

    The state is the tuple of ids so far. Write ``start`` and ``advance`` to remember something else, ``fork`` where a
    deep copy is the wrong or the slow way to copy it, ``mask`` where the tokens that may follow are known. Say
    ``hard = True`` where ψ forbids texts (−inf) and there is no mask: ``Local()`` then checks tokens as it draws them.

    Example:
        >>> class NoRepeat(BasePotential):
        ...     def log_psi(self, states, complete):
        ...         return [-float(len(ids) - len(set(ids))) for ids in states]
        >>> NoRepeat().log_psi([(1, 2, 1)], [False])
        [-1.0]
    """

    name: str
    hard: ClassVar[bool] = False  # says −inf of some texts that go on: worth a look before a token is written

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> State:  # noqa: ARG002  part of the protocol
        """The state of the empty continuation: no ids."""
        return Ids()

    def advance(self, state: State, tokens: Sequence[int]) -> State:
        """The ids with ``tokens`` after them."""
        return Ids((*state, *tokens))

    def fork(self, state: State) -> State:
        """A deep copy of the state."""
        return copy.deepcopy(state)

    @abstractmethod
    def log_psi(self, states: Sequence[State], complete: Sequence[bool]) -> Sequence[float]:
        """``log ψ`` of each state."""

    def mask(self, states: Sequence[State]) -> torch.Tensor | None:  # noqa: ARG002  part of the protocol
        """No mask: every token may follow."""
        return None

    def __mul__(self, other: object) -> "Product":
        return Product.of(self, other) if isinstance(other, Potential) else NotImplemented

    def __rmul__(self, other: object) -> "Product":
        return Product.of(other, self) if isinstance(other, Potential) else NotImplemented


class ProductState(NamedTuple):
    """The states of a product's factors, and the size of the vocabulary their masks must have."""

    size: int
    states: list[State]


@dataclass(frozen=True)
class Product(BasePotential):
    """``ψ = ψ_1 · ψ_2 · …``: log values add, masks intersect.

    A factor is not asked about a state that an earlier one gave weight zero, so put the cheap ones first.
    """

    factors: tuple[Potential, ...]
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", " * ".join(factor.name for factor in self.factors))

    @classmethod
    def of(cls, *potentials: Potential) -> "Product":
        """The product of potentials, those that are products taken apart."""
        nested = (p.factors if isinstance(p, Product) else (p,) for p in potentials)
        return cls(tuple(factor for factors in nested for factor in factors))

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> ProductState:
        """The factors' first states."""
        return ProductState(vocabulary.size, [factor.start(vocabulary, prompt) for factor in self.factors])

    def advance(self, state: ProductState, tokens: Sequence[int]) -> ProductState:
        """Advance each factor."""
        pairs = zip(self.factors, state.states, strict=True)
        return ProductState(state.size, [factor.advance(own, tokens) for factor, own in pairs])

    def fork(self, state: ProductState) -> ProductState:
        """Fork each factor."""
        pairs = zip(self.factors, state.states, strict=True)
        return ProductState(state.size, [factor.fork(own) for factor, own in pairs])

    def log_psi(self, states: Sequence[ProductState], complete: Sequence[bool]) -> list[float]:
        """The sum of the factors' values; −inf as soon as one says so."""
        total = torch.zeros(len(states), dtype=torch.float64)
        for k, factor in enumerate(self.factors):
            alive = torch.nonzero(total > -torch.inf).flatten()
            asked = alive.tolist()
            total[alive] += evaluate(factor, [states[i].states[k] for i in asked], [complete[i] for i in asked])
        return total.tolist()

    def mask(self, states: Sequence[ProductState]) -> torch.Tensor | None:
        """The tokens that every factor allows, packed: (n, ⌈V/32⌉) int32."""
        size = states[0].size if states else 0
        masks = [allowed_words(f, [s.states[k] for s in states], size) for k, f in enumerate(self.factors)]
        given = [mask for mask in masks if mask is not None]
        return functools.reduce(torch.bitwise_and, given) if given else None


def evaluate(potential: Potential, states: Sequence[State], complete: Sequence[bool]) -> torch.Tensor:
    """``log ψ`` of the states, checked: the one way in which potentials are asked for values.

    Args:
        potential: any potential.
        states: n states of it.
        complete: n flags, True for a finished continuation.

    Returns:
        (n,) float64; −inf is a value.

    Raises:
        PotentialError: the potential raised, or did not return n numbers.
        InvalidWeight: a value is NaN or +inf; the message names the potential and shows the state.
    """
    if not states:
        return torch.zeros(0, dtype=torch.float64)
    log_psi = _floats(potential, _guarded(potential, "log_psi", potential.log_psi, states, complete), len(states))
    wrong = torch.isnan(log_psi) | (log_psi == torch.inf)  # (n,) bool
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise InvalidWeight(
            f"potential {potential.name!r} gave log ψ = {log_psi[i].item()} for {_describe(states[i])}; a finite "
            "number is wanted, or -inf to forbid it"
        )
    return log_psi


def masks(psi: Potential) -> bool:
    """Whether a potential tells which tokens may follow: it has a ``mask`` of its own."""
    return getattr(type(psi), "mask", None) is not BasePotential.mask


def allowed(potential: Potential, states: Sequence[State], vocab_size: int) -> torch.Tensor | None:
    """The mask of the states, checked: (n, V) bool, or None where the potential has none.

    Raises:
        PotentialError: the potential raised, or the mask is neither bool (n, V) nor int32 (n, ⌈V/32⌉).
    """
    mask = _checked_mask(potential, states, vocab_size)
    return mask if mask is None or mask.dtype == torch.bool else unpack_bits(mask, vocab_size)


def allowed_words(potential: Potential, states: Sequence[State], vocab_size: int) -> torch.Tensor | None:
    """As ``allowed``, packed: (n, ⌈V/32⌉) int32, token i at bit ``i mod 32`` of word ``i div 32``."""
    mask = _checked_mask(potential, states, vocab_size)
    return mask if mask is None or mask.dtype == torch.int32 else pack_bits(mask)


def _checked_mask(potential: Potential, states: Sequence[State], vocab_size: int) -> torch.Tensor | None:
    mask = _guarded(potential, "mask", potential.mask, states) if states else None
    if mask is None:
        return None
    dense, packed = (len(states), vocab_size), (len(states), -(-vocab_size // 32))
    if isinstance(mask, torch.Tensor) and {torch.bool: dense, torch.int32: packed}.get(mask.dtype) == mask.shape:
        return mask
    found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise PotentialError(
        f"the mask of potential {potential.name!r} must be a bool tensor of shape {dense}: a row for each state "
        f"and a column for each token id, or the same packed into int32 words, {packed}; it is {found}"
    )


def _guarded(potential: Potential, verb: str, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of a potential; an error of the user's becomes one that names the potential."""
    try:
        return method(*args)
    except SMCDecodeError:
        raise
    except Exception as error:
        raise PotentialError(
            f"potential {potential.name!r} raised {type(error).__name__} in {verb}: {error}; the first of its "
            f"{len(args[0])} states is {_describe(args[0][0])}"
        ) from error


def _floats(potential: Potential, values: Any, n: int) -> torch.Tensor:
    """What a potential returned, as (n,) float64."""
    try:
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PotentialError(f"potential {potential.name!r} must return {n} numbers: {error}") from error
    if tensor.shape != (n,) or tensor.dtype == torch.bool or tensor.is_complex():
        raise PotentialError(
            f"potential {potential.name!r} must return {n} numbers, log ψ of each state (0.0 leaves it as it is, "
            f"-math.inf forbids it); it returned {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.detach().to("cpu", torch.float64)


def _describe(state: State) -> str:
    """A state, for messages."""
    return repr(state) if isinstance(state, TextRead | IdsRead) else f"the state {shorten(repr(state))}"
