"""A model of which every rank holds a part: rank 0's stores and passes, repeated on the others. Knows pages, no text.

transformers splits the model by its ``tp_plan`` and adds up what the parts give; each rank's pages hold the keys and
values of the heads that it has. Here is what must reach the others besides: which pages, which tokens, in which order.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from smcdecode.engine.attention import Attention, Batch, View
from smcdecode.engine.cache import KVStore, Layout
from smcdecode.engine.ranks import Ranks
from smcdecode.errors import InvalidOption, UnsupportedModel

__all__ = ["Shards", "check_heads", "is_split", "load_split"]

Run = Callable[[Tensor, Tensor, View, Tensor], Tensor]


def check_heads(config: Any, ranks: int, name: str) -> None:
    """Refuse a model whose attention heads cannot be shared out evenly.

    Raises:
        UnsupportedModel: naming the heads and the numbers of ranks that would do.
    """
    text = config.get_text_config()
    for what, key in (("attention heads", "num_attention_heads"), ("heads of keys", "num_key_value_heads")):
        heads = getattr(text, key, None)
        if heads and heads % ranks:
            *some, most = (str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UnsupportedModel(
                f"{name} has {heads} {what}, which {ranks} ranks cannot share evenly: start "
                f"{' or '.join(filter(None, (', '.join(some), most)))}, or give whole models prompts of their own"
            )


def load_split(folder: str | Path, dtype: torch.dtype, ranks: int, name: str) -> PreTrainedModel:
    """A checkpoint split over all ranks by transformers' own plan; each rank reads its part only.

    Raises:
        UnsupportedModel: transformers has no plan for this kind of model.
    """
    from transformers.distributed import DistributedConfig  # needs a torch that can

    plan = DistributedConfig(tp_plan="auto", tp_size=ranks)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=plan)
    except ValueError as error:
        if "tp_plan" not in str(error):
            raise
        raise UnsupportedModel(f"transformers knows no way to split {name}: {error}") from error
    if not is_split(model):
        raise UnsupportedModel(f"transformers knows no way to split {name} ({type(model).__name__} has no tp_plan)")
    return model


def is_split(model: PreTrainedModel) -> bool:
    """Whether this process holds parts of the model's weights only."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


class Shards:
    """What a split model has on each rank: its passes, and the stores that they write.

    Args:
        ranks: that hold the model.
        name: of the model.
        layout: of this rank's keys and values.
        attention: how it attends.
        run: one pass of this rank's part.
    """

    def __init__(self, ranks: Ranks, name: str, layout: Layout, attention: Attention, run: Run) -> None:
        self.ranks, self.name, self.layout, self.attention, self.run = ranks, name, layout, attention, run
        self._number = ranks.enter(self)
        self._stores: dict[int, KVStore] = {}  # of a rank that follows
        self._names = itertools.count()  # of stores
        self._dropped: list[int] = []  # stores that rank 0 needs no more, and has not told of
        self._plans: weakref.WeakKeyDictionary[View, tuple[int, Batch]] = weakref.WeakKeyDictionary()

    # ---- on rank 0

    def store(self, pages: int, page_size: int) -> KVStore:
        """A store here, and one like it on every rank."""
        self._tell("_open", number := next(self._names), pages, page_size)
        store = _Store(self, number, pages, page_size)
        weakref.finalize(store, self._dropped.append, number)
        return store

    def plan(self, batch: Batch, store: KVStore) -> View:
        """The view of a batch on such a store; good for one pass."""
        view = self.attention.plan(batch, store)
        self._plans[view] = store.number, batch  # type: ignore[attr-defined]
        return view

    def __call__(self, tokens: Tensor, positions: Tensor, view: View, rows: Tensor) -> Tensor:
        """One pass, on all ranks; arguments and result as of the model."""
        store, batch = self._plans.pop(view)
        of_batch = [getattr(batch, field.name) for field in fields(batch)]
        self._tell("_pass", store, *map(_packed, (tokens, positions, rows, *of_batch)))
        with self.ranks.passing():
            return self.run(tokens, positions, view, rows)

    def copy(self, store: int, src: Tensor, dst: Tensor) -> None:
        """Copy pages in the other ranks' stores."""
        self._tell("_copy", store, _packed(src), _packed(dst))

    def _tell(self, verb: str, *args: Any) -> None:
        if not self.ranks.leading:
            raise InvalidOption(
                f"{self.name} is split over {self.ranks.size} ranks, and this call would run it on one of them: "
                "make it, on every rank, through smc.sample, smc.stream, smc.exact or smc.plan"
            )
        if self._dropped:
            gone = [self._dropped.pop() for _ in range(len(self._dropped))]
            self.ranks.tell(self._number, "_drop", gone)
        self.ranks.tell(self._number, verb, *args)

    # ---- on the others, as told

    def over(self) -> None:
        """A call of rank 0's has ended, and with it the use of its stores."""
        self._stores.clear()

    def _open(self, number: int, pages: int, page_size: int) -> None:
        self._stores[number] = KVStore(self.layout, pages, page_size)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._stores.pop(number, None)

    def _copy(self, store: int, *pages: Any) -> None:
        self._stores[store].copy_pages(*(_unpacked(x, self.layout.device) for x in pages))

    def _pass(self, store: int, *numbers: Any) -> None:
        tokens, positions, rows, *of_batch = (_unpacked(x, self.layout.device) for x in numbers)
        with self.ranks.passing():
            self.run(tokens, positions, self.attention.plan(Batch(*of_batch), self._stores[store]), rows)


class _Store(KVStore):
    """Rank 0's part of a store that every rank has a part of."""

    def __init__(self, shards: Shards, number: int, pages: int, page_size: int) -> None:
        super().__init__(shards.layout, pages, page_size)
        self.shards, self.number = shards, number

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """See :class:`KVStore`."""
        self.shards.copy(self.number, src, dst)
        super().copy_pages(src, dst)


class _Array(NamedTuple):
    """A tensor as it travels: whole numbers in 32 bits, which ids, positions and pages fit."""

    numbers: NDArray[Any]
    placed: bool  # it lay on a device, not on the host


def _packed(x: Any) -> Any:
    """Tensors, and tuples of them, as arrays, which pickle takes quickly; anything else as it is."""
    if isinstance(x, Tensor):
        numbers = x.cpu().numpy()
        return _Array(numbers.astype(np.int32) if x.dtype == torch.int64 else numbers, x.device.type != "cpu")
    return tuple(map(_packed, x)) if isinstance(x, tuple) else x


def _unpacked(x: Any, device: torch.device) -> Any:
    """What :func:`_packed` took, on this rank's device where it was on one."""
    if isinstance(x, _Array):
        tensor = torch.from_numpy(x.numbers)
        tensor = tensor.long() if tensor.dtype == torch.int32 else tensor
        return tensor.to(device) if x.placed else tensor
    return tuple(_unpacked(part, device) for part in x) if isinstance(x, tuple) else x
