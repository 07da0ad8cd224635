"""A Hugging Face causal language model behind one call: (tokens, positions, view, rows) → logits.

Knows transformers' attention interface; knows no page table, particle or potential. The modelling code is the model's
own: one registered attention function hands queries, keys and values to the view that travels with the call.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from smcdecode.declare.target import Algebra, Target
from smcdecode.engine.attention import Attention, Batch, Frame, Padded, View
from smcdecode.engine.cache import KVStore, Layout
from smcdecode.engine.cascade import TorchAttention
from smcdecode.engine.compiled import Compiled
from smcdecode.engine.cuts import Cuts
from smcdecode.engine.ranks import Ranks
from smcdecode.engine.shards import Shards
from smcdecode.errors import UnsupportedModel
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["ATTENTION", "LanguageModel", "Recipe", "paged_attention", "register_attention", "structural_copy"]

ATTENTION = "smcdecode"  # the name under which transformers finds our attention function

# What an attention call may carry besides its scores' rule; any other argument would be ignored, so it is refused.
HARMLESS = frozenset(
    {
        "cache", "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "output_attentions",
        "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values", "position_embeddings",
        "position_ids", "return_dict", "training", "use_cache",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model was loaded: the same call gives the same model in another process."""

    source: str | Path
    options: dict[str, Any]


class LanguageModel(Algebra):
    """A model ready to run over pages; made by :func:`smcdecode.load`. Stands for the law p (or q) of its logits.

    Attributes:
        name: how messages call it.
        vocabulary: what its token ids mean; logit rows are cut to ``vocabulary.size``.
        tokenizer: the Hugging Face tokenizer, or None.
        context: most positions it can attend over; None if unlimited.
        layout: what a token stores, layer by layer.
        parameters: how many numbers its weights are, shared ones counted once; 0 if unknown.
        recipe: how it was loaded, if from a name or a folder.
        attention: how it attends; plain torch by default.
        ranks: the processes that hold it together; None where this one holds all of it.
        graphs: whether cycles of it as a target run as one function over fixed buffers, recorded as a CUDA graph on a
            GPU, where they can be.
        compiled: its passes in recorded cycles, compiled by ``torch.compile``; None where they run as they are.
    """

    recipe: Recipe | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        vocabulary: Vocabulary,
        tokenizer: Any,
        context: int | None,
        layout: Layout,
        cuts: Cuts | None = None,
        parameters: int = 0,
        attention: Attention | None = None,
        ranks: Ranks | None = None,
        graphs: bool = False,
        compile: bool = False,
    ) -> None:
        self._module, self._cuts = module, cuts
        self.name, self.vocabulary, self.tokenizer = name, vocabulary, tokenizer
        self.context, self.layout, self.parameters = context, layout, parameters
        self.attention = attention or TorchAttention()
        self.ranks = ranks
        self._shards = None if ranks is None else Shards(ranks, name, layout, self.attention, self._run)
        self.graphs = graphs
        self.compiled = Compiled(module, name) if compile else None

    def __repr__(self) -> str:
        where = f"{self.dtype}, {self.device}, attention by {self.attention.name}"
        if self.ranks is not None:
            where += f", rank {self.ranks.rank} of {self.ranks.size}, layers as transformers splits them"
        where += ", compiled in recorded cycles" if self.compiled is not None else ""
        return f"LanguageModel({self.name!r}, {self.vocabulary.size} tokens, {where})"

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and activations."""
        return self.layout.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.layout.device

    def as_target(self) -> Target:
        """The target that is p itself."""
        return Target(self)

    def store(self, pages: int, page_size: int) -> KVStore:
        """Room for the keys and values of ``pages`` pages; page 0 is the null page."""
        return KVStore(self.layout, pages, page_size) if self._shards is None else self._shards.store(pages, page_size)

    def plan(self, batch: Batch, store: KVStore) -> View:
        """The view of a batch on a store of this model; good for one pass."""
        return (self.attention if self._shards is None else self._shards).plan(batch, store)

    def __call__(self, tokens: Tensor, positions: Tensor, view: View, rows: Tensor) -> Tensor:
        """One pass over packed tokens.

        Args:
            tokens: (T,) int64 ids, packed as the view's batch. They, positions and rows may lie on the host.
            positions: (T,) int64 absolute positions.
            view: of :meth:`plan`; its store receives the new keys and values.
            rows: (R,) int64 packed indices whose logits are wanted.

        Returns:
            (R, vocabulary.size) float32 logits; row r is the law of the token after ``tokens[rows[r]]``.
        """
        return (self._run if self._shards is None else self._shards)(tokens, positions, view, rows)

    @torch.inference_mode()
    def fixed(self, tokens: Tensor, frame: Frame, store: KVStore, rows: Tensor) -> Tensor:
        """One pass of fixed shape over a frame's packed tokens (T,), all on the device; see :meth:`__call__`."""
        known = tokens.clamp(max=self.vocabulary.size - 1)
        most = None if self.context is None else self.context - 1  # what is beyond is nobody's token
        positions, view = frame.positions.clamp(0, most).flatten(), self.attention.fixed(frame, store)
        return self._logits(self.compiled or self._module, known, positions, view, rows)

    @torch.inference_mode()
    def _run(self, tokens: Tensor, positions: Tensor, view: View, rows: Tensor) -> Tensor:
        """The pass, or this rank's part of it."""
        tokens, positions, rows = (x.to(self.device) for x in (tokens, positions, rows))
        return self._logits(self._module, tokens, positions, view, rows)

    def _logits(
        self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor, view: View, rows: Tensor
    ) -> Tensor:
        more = 0 if self._cuts is None else self._cuts.set(view.kin, rows)
        if more:
            tokens, positions = (torch.cat([x, x[-1:].expand(more)]) for x in (tokens, positions))
            view = Padded(view, more)
        logits: Tensor = forward(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, view=view
        ).logits
        return logits[0, :, : self.vocabulary.size].float()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    view: View | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls once a layer: reads and writes pages through ``view``.

    Args:
        module: the attention layer; its ``layer_idx`` tells which.
        query: (1, heads, T, key_dim).
        key: (1, kv_heads, T, key_dim).
        value: (1, kv_heads, T, value_dim).
        attention_mask: None; which keys a query sees is the view's to say.
        scaling: factor of the scores; key_dim ** -0.5 by default.
        dropout: 0.
        sliding_window: see :meth:`View.attend`.
        softcap: see :meth:`View.attend`.
        is_causal: not False.
        view: the pass.
        others: whatever else the model passes on.

    Returns:
        (1, T, heads, value_dim) and None.

    Raises:
        UnsupportedModel: if the call carries something that paged attention would have to ignore.
    """
    if view is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if attention_mask is not None or dropout or is_causal is False or not HARMLESS.issuperset(others):
        _refuse(module, attention_mask, dropout, is_causal, others)
    out = view.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


def _refuse(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    parts = [f"{name}=" for name, value in others.items() if value is not None and name not in HARMLESS]
    parts += ["an attention mask of its own"] if attention_mask is not None else []
    parts += [f"dropout={dropout}"] if dropout else []
    parts += ["attention to later tokens"] if is_causal is False else []
    if parts:
        raise UnsupportedModel(
            f"{type(module).__name__} computes its attention with {', '.join(parts)}, which paged attention does not do"
        )


def register_attention() -> None:
    """Tell transformers about our attention function. As it has no mask function, none is made and none waited for."""
    AttentionInterface.register(ATTENTION, paged_attention)


def structural_copy(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree and its config that shares all parameters and buffers with the original."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared).eval()
