"""Every Triton kernel three ways: interpreted against its definition, compiled for GPUs that are not here, and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smcdecode_kernels import reference

HERE = Path(__file__).parent

ARCHITECTURES = [80, 90, 100]
COMPILE = """
import re, subprocess, sys, tempfile
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile
from smcdecode_kernels.triton_kernels import _BLOCK, _apply_bitmask

sm, dtype = int(sys.argv[1]), sys.argv[2]
signature = dict(logits=f"*{dtype}", words="*i32", logits_stride="i64", words_stride="i64", V="i32", BLOCK="constexpr")
block = (_apply_bitmask.arg_names.index("BLOCK"),)
compiled = compile(ASTSource(_apply_bitmask, signature, {block: _BLOCK}), target=GPUTarget("cuda", sm, 32))
target = re.search(r"^\\.target (sm_\\w+)", compiled.asm["ptx"], re.M).group(1)
with tempfile.TemporaryDirectory() as folder:
    ptx = Path(folder, "kernel.ptx")
    ptx.write_text(compiled.asm["ptx"])
    run = [get_ptxas(sm).path, "-v", f"-arch={target}", ptx, "-o", Path(folder, "kernel.cubin")]
    print(subprocess.run(run, capture_output=True, text=True, check=True).stderr)
"""


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
    run(str(HERE / "interpreted_kernels.py"), **environment)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_compile_without_spilling_registers(triton, sm, dtype):
    log = run("-c", COMPILE, str(sm), dtype)
    assert re.search(r"0 bytes spill stores, 0 bytes spill loads", log), log


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


@pytest.mark.parametrize("words", [torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(1, 2).int()])
def test_masks_of_another_shape_are_refused(words):
    with pytest.raises(ValueError, match="2 rows of 40 bits in int32 words are wanted"):
        reference.apply_bitmask(torch.zeros(2, 40), words)
