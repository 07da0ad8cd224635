"""A model with some of its decoder layers only. Knows where transformers keeps them; no weights of its own."""

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from smcdecode.engine.cache import Layout
from smcdecode.engine.fast import FusedModel
from smcdecode.engine.model import LanguageModel, structural_copy
from smcdecode.errors import InvalidOption, UnsupportedModel

__all__ = ["LayerSkip", "check_count", "keep_layers", "layers_of"]


class LayerSkip(LanguageModel):
    """A model's own first layers, its last norm and its head, as a draft of it: no other weights, nothing trained.

    How well it guesses depends on the model: one trained for early exits does (Elhoushi et al. 2024, "LayerSkip"), most
    others need half their layers or more. It shares every tensor with the model and keeps its own keys and values.

    Args:
        model: from :func:`smcdecode.load`.
        layers: how many of its layers, counted from the first.

    Raises:
        InvalidOption: unless 1 ≤ layers < the model's.
        UnsupportedModel: if the model does not keep its layers in one list.
    """

    def __init__(self, model: LanguageModel, *, layers: int) -> None:
        if not isinstance(model, LanguageModel):
            raise InvalidOption(f"LayerSkip needs a model from smc.load(…); got {type(model).__name__}")
        shapes = model.layout.layers
        check_count(layers, len(shapes), model.name)
        super().__init__(
            _first(model._module, layers),
            name=f"{model.name}, first {layers} layers",
            vocabulary=model.vocabulary,
            tokenizer=model.tokenizer,
            context=model.context,
            layout=Layout(shapes[:layers], model.dtype, model.device),
            cuts=model._cuts,
            parameters=_parameters(model, layers),
            attention=model.attention,
            ranks=model.ranks,
            compile=model.compiled is not None,
        )


def _parameters(model: LanguageModel, layers: int) -> int:
    """Those of the embeddings, and the layers' part of all others."""
    ends = sum(part.weight.numel() for part in model._module.modules() if isinstance(part, nn.Embedding))
    return ends + (model.parameters - ends) * layers // len(model.layout.layers)


def _first(module: nn.Module, layers: int) -> nn.Module:
    """The same modules with fewer layers between them."""
    if isinstance(module, FusedModel):
        fused = copy.copy(module)
        fused.layers = module.layers[:layers]
        return fused
    assert isinstance(module, PreTrainedModel)
    name, blocks = layers_of(module)
    base, whole = _shell(module.base_model), _shell(module)
    setattr(base, name, blocks[:layers])
    setattr(whole, module.base_model_prefix, base)
    return whole


def _shell(module: nn.Module) -> nn.Module:
    """A module of its own with the same parts."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


def layers_of(module: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder layers of a model, and under what name its base model holds them.

    Raises:
        UnsupportedModel: where they cannot be told apart.
    """
    count = module.config.get_text_config().num_hidden_layers
    found = [
        (name, part)
        for name, part in module.base_model.named_children()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"{type(module).__name__} does not keep its {count} decoder layers in one list")
    return found[0]


def keep_layers(module: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model made of some decoder layers of another, in order; everything is shared with it, nothing is copied."""
    thin = structural_copy(module)
    name, layers = layers_of(thin)
    config = thin.config.get_text_config()
    types = getattr(config, "layer_types", None)
    setattr(thin.base_model, name, nn.ModuleList(layers[i] for i in kept))
    for index, i in enumerate(kept):
        for part in layers[i].modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index  # type: ignore[assignment]
    config.num_hidden_layers = len(kept)
    if types is not None:
        config.layer_types = [types[i] for i in kept]
    return thin


def check_count(layers: int, most: int, name: str) -> None:
    """Raise InvalidOption unless 1 ≤ layers < most, of a model called ``name``."""
    if not isinstance(layers, int) or not 1 <= layers < most:
        raise InvalidOption(f"layers must be an integer from 1 to {most - 1}, fewer than {name} has; got {layers!r}")
