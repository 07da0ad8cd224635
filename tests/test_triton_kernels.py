"""Every Triton kernel against its definition, interpreted or on a GPU; and compiled for GPUs that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smcdecode_kernels import reference

HERE = Path(__file__).parent


@pytest.fixture
def triton():
    return pytest.importorskip("triton", reason="triton is not installed: pip install 'smcdecode[gpu]'")


def run(*command, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(HERE.parent), clean.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], env=clean | {"PYTHONPATH": path} | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_agree_with_their_definitions(triton):
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    print(run(str(HERE / "interpreted"), **environment))


def test_kernels_compile_without_spilling_registers(triton):
    figures = run(str(HERE / "compiled_kernels.py"), "80:bf16", "90:fp32", "100:bf16")
    print(figures)
    spills = re.findall(r"sm_(\d+) .* (\d+) bytes spilled", figures)
    assert {sm for sm, _ in spills} == {"80", "90", "100"} and {n for _, n in spills} == {"0"}, figures


@pytest.mark.parametrize("V", [1, 31, 32, 40, 1000])
def test_bits_are_tokens(V):
    mask = torch.rand(3, V, generator=torch.Generator().manual_seed(V)) < 0.5
    words = torch.zeros(3, -(-V // 32) + 1, dtype=torch.int64)
    for i, token in mask.nonzero().tolist():
        words[i, token // 32] |= 1 << token % 32
    logits = torch.randn(3, V)
    expected = logits.masked_fill(~mask, -torch.inf)
    packed = words.to(torch.int32)  # wraps bit 31 into the sign
    assert reference.apply_bitmask(logits, packed) is logits
    assert torch.equal(logits, expected)
    assert torch.equal(reference.unpack_bits(packed, V), mask)
    assert torch.equal(reference.pack_bits(mask), packed[:, :-1])


@pytest.mark.parametrize("words", [torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(1, 2).int()])
def test_masks_of_another_shape_are_refused(words):
    with pytest.raises(ValueError, match="2 rows of 40 bits in int32 words are wanted"):
        reference.apply_bitmask(torch.zeros(2, 40), words)
