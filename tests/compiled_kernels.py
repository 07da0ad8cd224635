"""Compile every Triton kernel for a GPU that is not here; run as a program: prints registers, spills, shared memory.

Arguments are like ``90:fp32``: the architecture, and the type of logits.

The names of arguments give their types, the same in all kernels.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

from smcdecode_kernels.triton_kernels import bitmask, groups, laws, overlap, pages

POINTERS = {
    "fp64": "log_r log_pa log_z log_w increments threshold ess log_mean q_norm r_norm strictness log_ratio share",
    "fp32": "inverse_temperature alpha floor q_inverse_temperature q_alpha q_floor "
    "r_inverse_temperature r_alpha r_floor top total base_top base_total over excess result",
    "i64": "rows tokens seed particle cycle place r_rows emitted ancestors state_a",
    "i32": "words q_words r_words used counts free left keep cached length source copy state_b",
    "i1": "may_resample resampled refused slots state_c",
}
NUMBERS = {"i64": "stride words_stride q_stride q_words_stride r_stride r_words_stride logits_stride"}
COMMON = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names.split()}
COMMON |= {name: kind for kind, names in NUMBERS.items() for name in names.split()}

CHUNK, WIDEST = laws.CHUNK, 1024  # chunks of a vocabulary of 262,144 tokens
BLOCK = {"CHUNK": CHUNK, "BLOCK": WIDEST}
NO_LAW = {"alpha": None, "floor": None, "words": None}
NO_BASE = {"base_top": None, "base_total": None}
PAGES = {"rows": "*i32"}
KERNELS = [  # kernel, what is fixed, types that differ from the common ones
    (bitmask._apply_bitmask, {"BLOCK": bitmask._BLOCK}, {}),
    (laws._sums, {"CHUNKS": laws._CHUNKS, "CHUNK": CHUNK}, {}),
    (laws._sums, {"CHUNKS": laws._CHUNKS, "CHUNK": CHUNK} | NO_LAW | NO_BASE, {}),
    (laws._draw, BLOCK, {}),
    (laws._draw, BLOCK | NO_LAW, {}),
    (laws._score, {"BLOCK": WIDEST}, {}),
    (laws._floor, {"BLOCK": laws._BLOCK, "BY_MASS": True}, {"num_warps": 8}),
    (overlap._overlap, {"CHUNKS": overlap._CHUNKS, "CHUNK": CHUNK}, {}),
    (overlap._judge, BLOCK, {}),
    (groups._weigh, {"BLOCK": 1024, "STRATIFIED": True}, {"total": "*fp64"}),
    (groups._weigh, {"BLOCK": 8, "STRATIFIED": False}, {"total": "*fp64"}),
    (pages._select, {"BLOCK": pages._BLOCK}, PAGES),
    (pages._clear, {"BLOCK": pages._BLOCK}, PAGES),
    (pages._grow, {"BLOCK": pages._BLOCK}, PAGES),
    (pages._grow, {"BLOCK": pages._BLOCK, "M": 1, "page_size": 1}, PAGES),  # launches make constants of ones
    (overlap._judge, BLOCK | {"C": 1, "accept": 1, "q_words_stride": 1, "r_words_stride": 1}, {}),
]


def compiled(kernel, fixed, different, sm, logits):
    """Registers, spilled bytes and shared memory of one kernel."""
    different = dict(different)
    options = {"num_warps": different.pop("num_warps", 4)}
    rows = dict.fromkeys(("logits", "q_logits", "r_logits"), f"*{logits}")
    common = COMMON | rows | different
    signature = {name: "constexpr" if name in fixed else common.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    done = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", sm, 32), options=options)
    target = re.search(r"^\.target (sm_\w+)", done.asm["ptx"], re.M).group(1)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(done.asm["ptx"])
        command = [get_ptxas(sm).path, "-v", f"-arch={target}", ptx, "-o", Path(folder, "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()))
    return int(re.search(r"Used (\d+) registers", log).group(1)), spills, done.metadata.shared


def main(sm, logits):
    for kernel, fixed, different in KERNELS:
        registers, spills, shared = compiled(kernel, fixed, different, sm, logits)
        options = "" if "alpha" not in kernel.arg_names else " plain" if "alpha" in fixed else " masked"
        name = f"{kernel.__name__}{options} {fixed['BLOCK'] if 'BLOCK' in fixed else fixed['CHUNKS']}"
        print(f"sm_{sm} {logits} {name}: {registers} registers, {spills} bytes spilled, {shared} bytes shared")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sm, logits = argument.split(":")
        main(int(sm), logits)
