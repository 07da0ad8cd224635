"""What the kernels are tried on: random rows with ties, dead tokens, dead rows and NaN, in every type of logits."""

import dataclasses

import torch

from smcdecode_kernels.laws import Key, Law

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved(value):
    """A tensor, or a dataclass of tensors, on the device."""
    if not dataclasses.is_dataclass(value):
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    return type(value)(*(moved(getattr(value, field.name)) for field in dataclasses.fields(value)))


def flip(g):
    return bool(torch.rand((), generator=g) < 0.5)


def rows_of(g, R, V):
    """Logits (R, V) of some type, rows lying apart."""
    x = torch.randn(R, V + 3, generator=g) * [1.0, 6.0][flip(g)]
    if flip(g):
        x = x.round()  # ties
    if flip(g):
        x[torch.rand(x.shape, generator=g) < 0.3] = -torch.inf
        x[:, int(torch.randint(V, (), generator=g))] = 0.0
    if R > 1 and flip(g):
        x[0] = -torch.inf
    return x.to([torch.float32, torch.bfloat16, torch.float16][int(torch.randint(3, (), generator=g))])[:, :V]


def law_of(g, R, V):
    """Laws with some of temperature, exponent, floor and mask; now and then a row that is not a number."""
    logits = rows_of(g, R, V)
    if R > 2 and flip(g):
        logits[2, V // 2] = [torch.nan, torch.inf][flip(g)]
    words = torch.randint(-(2**31), 2**31, (R, -(-V // 32) + 1), generator=g).to(torch.int32)
    if R > 3:
        words[3] = 0
    alpha = torch.rand(R, generator=g) * 3 + 0.5
    floor = torch.randn(R, generator=g) - 1
    return Law(
        logits, torch.rand(R, generator=g) * 1.5 + 0.5,
        *(x if flip(g) else None for x in (alpha, floor, words)),
    )  # fmt: skip


def key_of(g, n, stream=0):
    """Keys of n uniforms, beyond 32 bits too."""
    seed, *counters = torch.randint(-(2**62), 2**62, (4, n), generator=g)
    return Key(seed, *counters, stream)


def generator(seed):
    return torch.Generator().manual_seed(seed)
