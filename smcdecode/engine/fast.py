"""Making passes fast on a CPU without changing results beyond rounding. Knows module structure; no pages, no particles.

Two things, each of which can be deleted:

* linear layers whose weights are packed once for oneDNN's kernels (:mod:`smcdecode.engine.packed`), and lie in huge
  pages;
* decoder layers of the plain pre-norm kind rewritten in fewer operations (``FusedLayer``). A layer is recognised by
  the names of its parts and then *compared with the original on random input*: what differs is left as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smcdecode.engine.attention import Rule, View
from smcdecode.engine.cuts import Cuts, Rows
from smcdecode.engine.huge import gather
from smcdecode.engine.packed import Packed, PackedLinear
from smcdecode.engine.shards import is_split

__all__ = ["FusedLayer", "FusedModel", "packable", "quicken", "straighten"]

CLOSE = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # relative difference at which a fused layer is the original


class Angles:
    """The pass's rotary angles as the fused layers want them, prepared by the first layer for the others.

    Args:
        turned: heads that are rotated, queries' and keys'.
        still: heads after them that are not, the values'.
    """

    def __init__(self, turned: int, still: int) -> None:
        self.turned, self.still = turned, still
        self._source: tuple[Tensor, Tensor] | None = None
        self._ready: tuple[Tensor, Tensor] | None = None

    def of(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, T, dim) → both (T, heads, dim), sines' first half negated; 1 and 0 for still heads."""
        if self._ready is None or self._source is not embeddings:
            cos, sin = (angle[0][:, None].expand(-1, self.turned, -1) for angle in embeddings)
            half = sin.shape[-1] // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            blank = cos.new_zeros(len(cos), self.still, cos.shape[-1])
            self._source, self._ready = embeddings, (torch.cat([cos, blank + 1], 1), torch.cat([sin, blank], 1))
        return self._ready


class FusedLayer(nn.Module):
    """A pre-norm decoder layer (RMS norms, rotary attention, gated SiLU) in about a quarter of the usual operations.

    Args:
        layer: the original, recognised by :func:`_is_plain`.
        rule: how its attention scores.
        rows: the pass's cut.
        angles: shared by the layers of a model, one for each number of heads.
    """

    def __init__(self, layer: Any, rule: Rule, rows: Rows, angles: dict[tuple[int, int], Angles]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.dim, self.rule = attention.layer_idx, attention.head_dim, rule
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.heads, kv_heads = (p.weight.shape[0] // self.dim for p in projections[:2])
        self.turned = self.heads + kv_heads
        self.angles = angles.setdefault((self.turned, kv_heads), Angles(self.turned, kv_heads))
        self.qkv = _together(projections, rows)
        self.out = Packed(attention.o_proj.weight, attention.o_proj.bias, rows)
        self.gate, self.up, self.down = (
            Packed(p.weight, p.bias, rows) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.before, self.after = RMS(layer.input_layernorm), RMS(layer.post_attention_layernorm)
        self.q_norm = RMS(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = RMS(attention.k_norm) if hasattr(attention, "k_norm") else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        view: View,
        **_others: Any,
    ) -> Tensor:
        """Map hidden_states (1, T, width) to the same shape; takes what transformers hands to every decoder layer."""
        x = hidden_states[0]
        x = self.out(self._attend(self.before(x), position_embeddings, view), "add", x)
        h = self.after(x)
        return self.down(self.up(h, "mul", self.gate(h, "swish")), "add", x)[None]

    def _attend(self, h: Tensor, embeddings: tuple[Tensor, Tensor], view: View) -> Tensor:
        qkv = self.qkv(h).view(len(h), -1, self.dim)  # (T, heads + 2 kv_heads, dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = qkv.tensor_split((self.heads, self.turned), 1)
            qkv = torch.cat([self.q_norm(query), self.k_norm(key), value], 1)
        cos, sin = self.angles.of(embeddings)
        swapped = qkv.roll(self.dim // 2, -1)
        query, key, value = torch.addcmul(qkv * cos, swapped, sin).tensor_split((self.heads, self.turned), 1)
        scaling, window, softcap = self.rule
        return view.attend(self.index, query, key, value, scaling=scaling, window=window, softcap=softcap).flatten(1)


class RMS:
    """The root-mean-square norm of a module: x / √(mean x² + ε) · weight.

    It is the layer norm of (x, −x), whose mean is zero. Torch has a kernel for that one; the other it composes of seven
    operations over float32 copies, which are dear where the weights of every layer push them out of the caches.
    """

    def __init__(self, module: Any) -> None:
        self.width = len(module.weight)
        self.weight = module.weight.detach().repeat(2)
        self.eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Norm over the last dimension of x (…, width)."""
        both = torch.layer_norm(torch.cat([x, -x], -1), (2 * self.width,), self.weight, None, self.eps)
        return both[..., : self.width].clone(memory_format=torch.contiguous_format)


class Logits(NamedTuple):
    """What :class:`FusedModel` returns, under the name that transformers uses."""

    logits: Tensor


class FusedModel(nn.Module):
    """Embedding, fused layers, last norm and head of a model, without the bookkeeping around them.

    Args:
        model: the original, all its decoder layers fused.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.base_model
        self.embed, self.rotary, self.head = base.embed_tokens, base.rotary_emb, model.lm_head
        self.layers, self.norm = list(base.layers), RMS(base.norm)

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        view: View,
        logits_to_keep: Tensor | None = None,
        **_others: Any,
    ) -> Logits:
        """Logits (1, R, vocabulary) of input_ids (1, T) at the rows to keep."""
        x = self.embed(input_ids)
        angles = self.rotary(x, position_ids)
        for layer in self.layers:
            x = layer.forward(x, position_embeddings=angles, view=view)
        kept = x if logits_to_keep is None else x[:, logits_to_keep]
        return Logits(self.head(self.norm(kept)))


def _together(projections: Sequence[Any], rows: Rows) -> Packed:
    weight = torch.cat([p.weight for p in projections])
    biases = [p.bias for p in projections]
    if any(b is not None for b in biases):
        biases = [p.weight.new_zeros(p.weight.shape[0]) if p.bias is None else p.bias for p in projections]
        return Packed(weight, torch.cat(biases), rows)
    return Packed(weight, None, rows)


LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _is_plain(layer: Any) -> bool:
    """Whether a module has the parts of a layer that :class:`FusedLayer` may replace; comparing comes after."""
    parts = dict(layer.named_children())
    if parts.keys() != LAYER:
        return False
    attention, mlp = (dict(parts[name].named_children()) for name in ("self_attn", "mlp"))
    linears = [part for name, part in (*attention.items(), *mlp.items()) if name.endswith("_proj")]
    return (
        attention.keys() in ATTENTION
        and mlp.keys() == GATED
        and all(type(linear) is nn.Linear for linear in linears)
        and all(hasattr(layer.self_attn, name) for name in ("head_dim", "layer_idx"))
    )


def packable(module: PreTrainedModel) -> bool:
    """Whether oneDNN can pack this model's linear layers: whole ones on a CPU, in bfloat16 or float32."""
    if is_split(module):
        return False  # each has something of transformers' around it, which the ranks need
    return module.device.type == "cpu" and module.dtype in CLOSE and torch._C._has_mkldnn


def quicken(module: PreTrainedModel, rules: Sequence[Rule], calls: Mapping[nn.Module, Mapping[str, Any]]) -> Cuts:
    """Pack the linear layers of a model on a CPU, and fuse the decoder layers that allow it.

    Args:
        module: the model; its submodules are replaced, its parameters are not touched.
        rules: how each layer's attention scores.
        calls: the keyword arguments that each module got in a trial pass.

    Returns:
        The cuts that the packed layers follow; to be set before each pass.
    """
    cuts = Cuts(Rows(), Rows())
    angles: dict[tuple[int, int], Angles] = {}
    head = module.get_output_embeddings()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain(child) and child in calls:
                fused = FusedLayer(child, rules[child.self_attn.layer_idx], cuts.body, angles)
                if _agree(child, fused, calls[child]):
                    setattr(parent, name, fused)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, cuts.head if child is head else cuts.body))
    gather(packed.place for part in module.modules() for packed in vars(part).values() if isinstance(packed, Packed))
    return cuts


def straighten(module: PreTrainedModel, **trial: Any) -> nn.Module:
    """The model without its bookkeeping, if it is no more than its fused layers, an embedding, a norm and a head.

    Args:
        module: after :func:`quicken`.
        trial: keyword arguments of a pass, to compare the two on.
    """
    whole: nn.Module = module
    base = module.base_model
    parts = [{name for name, _ in of.named_children()} for of in (base, module)]
    if parts != [{"embed_tokens", "layers", "norm", "rotary_emb"}, {module.base_model_prefix, "lm_head"}]:
        return whole
    if not all(type(layer) is FusedLayer for layer in base.layers) or type(base.embed_tokens) is not nn.Embedding:
        return whole
    straight = FusedModel(module)
    new, old = straight(**trial).logits, module(use_cache=False, **trial).logits
    return straight if _close(new, old, old) else whole


def _close(new: Tensor, old: Tensor, scale: Tensor) -> bool:
    """Whether two results differ by rounding only, measured against ``scale``."""
    return bool((new - old).float().norm() <= CLOSE.get(old.dtype, 0.0) * scale.float().norm())


def _agree(layer: Any, fused: FusedLayer, call: Mapping[str, Any]) -> bool:
    """Whether both add the same to a small random input, to rounding."""
    angles, weight = call.get("position_embeddings"), layer.input_layernorm.weight
    if not isinstance(angles, tuple) or angles[0].shape[-1] != fused.dim:
        return False
    x = torch.randn(1, angles[0].shape[1], len(weight), generator=torch.Generator().manual_seed(0)).to(weight) * 0.1
    old, new = (run(x, **call) for run in (layer, fused))
    if not isinstance(old, Tensor):
        return False
    return _close(new, old, old - x)
