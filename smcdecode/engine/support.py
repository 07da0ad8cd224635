"""Which models the engine runs exactly, found by trying them. Knows transformers' configs; no names of models.

A model is taken if its structure says nothing against it, if each of its layers calls the attention function once,
and if a short paged run gives the logits of the model's own eager attention. Anything else is refused.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smcdecode.engine.attention import Attention, Batch, Rule, View
from smcdecode.engine.cache import KVStore, LayerShape, Layout
from smcdecode.engine.cuts import Cuts
from smcdecode.engine.dense import causal
from smcdecode.engine.fast import packable, quicken, straighten
from smcdecode.engine.model import ATTENTION, register_attention
from smcdecode.errors import UnsupportedModel

__all__ = ["Examined", "check_config", "context_of", "examine"]

ATTENDING = frozenset({"full_attention", "sliding_attention", "attention"})
TRIAL, HEAD = 12, 7  # tokens of the trial run, and how many of them are its prompt
TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03}  # relative, in the norm of all logits; float32: 1e-3


def check_config(config: Any, name: str) -> None:
    """Refuse what a config already tells, before any weight is read.

    Raises:
        UnsupportedModel: naming the part in the way.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; smcdecode runs decoder-only language models")
    text = config.get_text_config()
    other = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDING)
    if other:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(other)}; every layer must be full or sliding-window attention, "
            "because only keys and values can be shared between particles page by page"
        )
    for rope in _rope_parameters(text):
        if rope.get("rope_type") == "dynamic":
            raise UnsupportedModel(f"{name} uses dynamic NTK RoPE, whose angles depend on the longest text of a batch")


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def context_of(config: Any) -> int | None:
    """Most positions the model is meant for; with longrope those of its short factors, which then always apply."""
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    for rope in _rope_parameters(text):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
            limits.append(getattr(text, "original_max_position_embeddings", None))
    known = [limit for limit in limits if limit]
    return min(known) if known else None


@dataclass(frozen=True)
class Examined:
    """What the trial of a model showed.

    Attributes:
        module: what to call: the model itself, or a quicker equal.
        layout: of its keys and values.
        width: of its logits.
        cuts: how its packed layers are told to cut a pass; None where nothing is packed.
    """

    module: nn.Module
    layout: Layout
    width: int
    cuts: Cuts | None


@torch.inference_mode()
def examine(module: PreTrainedModel, name: str, attention: Attention, *, pack: bool = True) -> Examined:
    """Set paged attention on a model, make it fast if it is on a CPU, and try it with a way to attend.

    Args:
        module: the model.
        name: how messages call it.
        attention: the way to attend.
        pack: whether layers may be packed for a CPU, which ``torch.compile`` could not read.

    Raises:
        UnsupportedModel: naming the part in the way.
    """
    check_config(module.config, name)
    _check_class(module, name)
    tokens = _trial_tokens(module)
    expected = _eager(module, tokens, name)
    _attach(module, name)
    recorder = _Recorder()
    with _noting_calls(module) as calls:
        _run(module, tokens[:HEAD], torch.arange(HEAD), recorder, name)
    layout = Layout(recorder.shapes(module.config, name), module.dtype, module.device)
    runs, cuts = module, None
    if pack and packable(module):
        cuts = quicken(module, [rule for _, _, rule in recorder.calls], calls)
        at = torch.arange(HEAD)
        runs = straighten(module, input_ids=tokens[None, :HEAD], position_ids=at[None], view=_Recorder())
    _compare(_paged(runs, tokens, layout, attention, name), expected[HEAD - 1 :], name)
    return Examined(runs, layout, expected.shape[-1], cuts)


@contextmanager
def _noting_calls(module: PreTrainedModel) -> Iterator[dict[nn.Module, dict[str, Any]]]:
    """Note the keyword arguments that each submodule is called with."""
    calls: dict[nn.Module, dict[str, Any]] = {}
    hooks = [
        part.register_forward_pre_hook(lambda part, _args, kwargs: calls.update({part: kwargs}), with_kwargs=True)
        for part in module.modules()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _check_class(module: PreTrainedModel, name: str) -> None:
    if getattr(module, "_is_stateful", False):
        raise UnsupportedModel(f"{name} ({type(module).__name__}) keeps a recurrent state besides keys and values")
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(
            f"{name} ({type(module).__name__}) is no causal language model of transformers' current kind: "
            "its forward takes no logits_to_keep"
        )


def _trial_tokens(module: PreTrainedModel) -> Tensor:
    size = int(module.get_input_embeddings().weight.shape[0])
    return (torch.arange(TRIAL, device=module.device) * 7919 + 1) % size


def _eager(module: PreTrainedModel, tokens: Tensor, name: str) -> Tensor:
    try:
        module.set_attn_implementation("eager")
        logits: Tensor = module(input_ids=tokens[None], use_cache=False).logits
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedModel(f"{name} does not run with eager attention: {error}") from error
    return logits[0]


def _attach(module: PreTrainedModel, name: str) -> None:
    register_attention()
    try:
        module.set_attn_implementation(ATTENTION)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedModel(f"{name} does not use transformers' attention interface: {error}") from error


def _run(module: nn.Module, tokens: Tensor, positions: Tensor, view: View, name: str) -> Tensor:
    try:
        out = module(input_ids=tokens[None], position_ids=positions.to(tokens.device)[None], use_cache=False, view=view)
    except TypeError as error:
        raise UnsupportedModel(f"{name} does not pass keyword arguments on to its attention: {error}") from error
    logits: Tensor = out.logits[0]
    return logits


class _Recorder:
    """A view without a store: attends causally over one row, and notes what each layer asked for."""

    def __init__(self) -> None:
        self.kin = torch.zeros(0, dtype=torch.int64)
        self.calls: list[tuple[int, LayerShape, Rule]] = []

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
        """Note the call; the output is the layer's own."""
        rule = Rule(scaling, window, softcap)
        self.calls.append((layer, LayerShape(key.shape[1], key.shape[2], value.shape[2]), rule))
        return causal(query, key, value, rule)[0]

    def shapes(self, config: Any, name: str) -> tuple[LayerShape, ...]:
        """The layers' shapes, after checking that each layer came once and windowed layers showed their window."""
        text = config.get_text_config()
        layers = [layer for layer, _, _ in self.calls]
        if layers != list(range(text.num_hidden_layers)):
            raise UnsupportedModel(
                f"{name} has {text.num_hidden_layers} layers, but its attention function was called for layers "
                f"{layers}: every layer must attend once, through transformers' attention interface"
            )
        for layer, _, rule in self.calls:
            if rule.window is None and _is_windowed(text, layer):
                raise UnsupportedModel(f"{name} does not tell its attention function the window of layer {layer}")
        return tuple(shape for _, shape, _ in self.calls)


def _is_windowed(config: Any, layer: int) -> bool:
    types: list[str] = getattr(config, "layer_types", None) or []
    return layer < len(types) and types[layer] == "sliding_attention"


def _paged(module: nn.Module, tokens: Tensor, layout: Layout, attention: Attention, name: str) -> Tensor:
    """Logits of the tokens from the prompt's last on, by a pass over the prompt and one over two rows that share it."""
    store = KVStore(layout, 12, 4)
    tail = TRIAL - HEAD
    one, pages = torch.ones(1, dtype=torch.int64), torch.tensor([1, 2])
    prompt = Batch(one * HEAD, pages[None], one * HEAD, one * 0, (pages[:0],), (0,))
    head = _run(module, tokens[:HEAD], torch.arange(HEAD), attention.plan(prompt, store), name)[-1:]
    lengths = torch.tensor([tail, tail])
    rows = Batch(lengths, torch.tensor([[3, 4], [5, 6]]), lengths, torch.tensor([0, 0]), (pages,), (HEAD,))
    positions = torch.arange(HEAD, TRIAL).repeat(2)
    both = _run(module, tokens[HEAD:].repeat(2), positions, attention.plan(rows, store), name)
    return torch.cat([head, both[tail:]])


def _compare(paged: Tensor, eager: Tensor, name: str) -> None:
    allowed = TOLERANCE.get(paged.dtype, 1e-3)
    paged, eager = (x.float() - x.float().mean(-1, keepdim=True) for x in (paged, eager))
    error = float((paged - eager).norm() / eager.norm().clamp_min(1e-30))
    if not error <= allowed:
        raise UnsupportedModel(
            f"{name} gives other logits with paged attention than with its own (relative difference {error:.2g}): "
            "its layers keep something besides keys and values, or use positions in a way that pages do not know"
        )
