"""A model's passes of fixed shape, compiled by ``torch.compile``. Knows shapes of passes; no store, no particle.

Each shape is compiled once, as one graph; a pass that is anything else is an error, never a slower pass. Attention is
one operation to the compiler, which sees queries, keys and values go in, and nothing of the view that they go to.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smcdecode.engine.attention import View
from smcdecode.engine.fast import Logits
from smcdecode.errors import UnsupportedModel

__all__ = ["Compiled"]

BACKEND = "inductor"  # what compiles graphs, by the name that torch.compile has for it
BOUNDLESS = 1 << 30  # times that dynamo may compile a function: we count them, and know how many there must be


class _Seat:
    """Where the view of the pass under way is found by a graph that knows the seat's number alone."""

    view: View | None = None


_SEATS: weakref.WeakValueDictionary[int, _Seat] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Compiled:
    """Stands for a causal language model in passes of fixed shape, with the keywords of its forward.

    Args:
        module: the model; its attention function is ours.
        name: how messages call it.

    Attributes:
        graphs: how many were compiled.
        runs: how often one ran.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name, self._count = name, _Count(BACKEND)
        self._seat, number = _Seat(), next(_NUMBERS)
        _SEATS[number] = self._seat
        self._shapes: set[tuple[int, int]] = set()
        seated = _Seated(number)

        def forward(input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
            logits: Tensor = module(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows, view=seated
            ).logits
            return logits

        self._forward = torch.compile(forward, fullgraph=True, dynamic=False, backend=self._count)

    @property
    def graphs(self) -> int:
        """How many were compiled."""
        return self._count.graphs

    @property
    def runs(self) -> int:
        """How often one ran."""
        return self._count.runs

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, view: View, use_cache: bool
    ) -> Logits:
        """Logits (1, R, vocabulary) of input_ids (1, T) at R rows to keep; the first pass of a shape compiles it.

        Raises:
            UnsupportedModel: the pass is not one graph, or was compiled for a shape that had been.
        """
        assert not use_cache, "keys and values are the view's"
        shape, before = (input_ids.shape[1], len(logits_to_keep)), (self.graphs, self.runs)
        fresh = shape not in self._shapes
        self._seat.view = view
        try:
            with torch._dynamo.config.patch(recompile_limit=BOUNDLESS, accumulated_recompile_limit=BOUNDLESS):
                logits = self._forward(input_ids, position_ids, logits_to_keep)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UnsupportedModel(
                f"{self.name} cannot be compiled as one graph for passes of {shape[0]} tokens: "
                f"load it with compile=False. {_said(error)}"
            ) from error
        finally:
            self._seat.view = None
            if self.graphs > before[0]:  # whatever became of the pass
                self._shapes.add(shape)
        compiled, ran = self.graphs - before[0], self.runs - before[1]
        if (compiled, ran) != (int(fresh), 1):
            raise UnsupportedModel(
                f"{self.name}: a pass of {shape[0]} tokens compiled {compiled} graphs and ran {ran}, where "
                f"{int(fresh)} and 1 were due: see that nothing switches torch.compile off, or load with compile=False"
            )
        return Logits(logits)


def _said(error: Exception) -> str:
    """What dynamo says first of all that it says."""
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:3])


class _Count:
    """A backend of ``torch.compile`` that counts what it compiles, and how often that runs. Holds no model."""

    def __init__(self, backend: str) -> None:
        self.backend, self.graphs, self.runs = backend, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        run: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)(graph, list(inputs))
        self.graphs += 1

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted


class _Seated:
    """A view as a graph sees it; see :class:`~smcdecode.engine.attention.View`."""

    def __init__(self, number: int) -> None:
        self.number, self.operation = number, _operation()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See :class:`~smcdecode.engine.attention.View`."""
        out: Tensor = self.operation(query, key, value, self.number, layer, scaling, window, softcap)
        return out


@functools.cache
def _operation() -> Any:
    """The operation ``smcdecode::attend``, which torch knows from the first call on.

    It does not tell torch that it writes into a store, which is no argument of it: no other operation of a graph reads
    one, and each layer's reads what the layer before has made.
    """
    made = torch.library.custom_op("smcdecode::attend", _attend, mutates_args=())
    made.register_fake(_like)
    return torch.ops.smcdecode.attend.default


def _attend(
    query: Tensor, key: Tensor, value: Tensor, seat: int, layer: int, scaling: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    view = _SEATS[seat].view
    assert view is not None, "no pass is under way"
    return view.attend(layer, query, key, value, scaling=scaling, window=window, softcap=softcap).contiguous()


def _like(
    query: Tensor, _key: Tensor, value: Tensor, _seat: int, _layer: int, _scaling: float, _window: int | None,
    _softcap: float | None,
) -> Tensor:  # fmt: skip
    return query.new_empty(*query.shape[:2], value.shape[2])
