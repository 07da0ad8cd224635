"""Where models come from: a name, a folder, the embedded demo, or a loaded model → LanguageModel. Knows no decoding."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from smcdecode.engine.attention import Attention
from smcdecode.engine.cascade import TorchAttention
from smcdecode.engine.damage import damage
from smcdecode.engine.demo import demo_folder
from smcdecode.engine.flashinfer import FlashInfer
from smcdecode.engine.model import LanguageModel, Recipe, structural_copy
from smcdecode.engine.ranks import Ranks, joined
from smcdecode.engine.shards import check_heads, is_split, load_split
from smcdecode.engine.support import check_config, context_of, examine
from smcdecode.errors import InvalidOption, UnsupportedModel
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Source", "attention_of", "checkpoint", "load"]

DEVICES = ("cpu", "cuda")
AttentionName = Literal["torch", "flashinfer"]
Source: TypeAlias = str | Path | PreTrainedModel | tuple[PreTrainedModel, Any]


def load(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: AttentionName | None = None,
    name: str | None = None,
    batch_invariant: bool = True,
    parallel: bool = False,
    graphs: bool | None = None,
    compile: bool = False,
) -> LanguageModel:
    """A language model ready to be a target or a proposal.

    Args:
        source: a Hugging Face name or local folder; ``"demo"`` for the small model of the ``demo`` extra; a loaded
            model, or ``(model, tokenizer)``. A loaded model is never changed: a copy of its structure that shares its
            weights is. Without a tokenizer, prompts and outputs are token ids.
        dtype: of the weights; by default the checkpoint's own where this machine is quick at it, else float32. A
            loaded model keeps its own.
        device: where it runs: a CUDA GPU, the default where there is one, or the CPU. Others are refused.
        attention: how it attends: "torch", the default on a CPU, or "flashinfer", the default elsewhere, which wants a
            GPU and 16 bits. What a model uses is part of its ``repr``.
        name: how messages call the model.
        batch_invariant: whether a prompt's bits, so its answer to a seed, are the same whatever else is in the batch.
            On a CPU this holds large passes to kernels for few rows; False lets passes of many prompts run several
            times faster, and rounding, though not the law, then depends on the company.
        parallel: split a checkpoint over the processes that torchrun started, one a GPU, by transformers' ``tp_plan``.
            Every process makes the same calls, and gets the same answers. Its layers are then transformers' own: on a
            CPU they are slower, and rounding depends on the company.
        graphs: for a target: whether a cycle is one function over fixed buffers, which a GPU records as a CUDA graph
            and replays. None: on a GPU. It serves targets without potentials, ``stats.recorded`` counts its cycles, and
            the others run step by step, as all do with False and where ``parallel``. On a CPU it gains nothing.
        compile: whether this model's passes in recorded cycles are compiled by ``torch.compile``, so wants ``graphs``.
            Each number of rows and of tokens a row compiles at its first cycle, a minute or more each for a large
            model: for servers and long jobs. Passes over prompts and cycles step by step run as they are. Wants a C
            compiler; on a CPU, layers are then transformers' own.

    Raises:
        UnsupportedModel: the engine cannot run this model exactly, or not on its device; the message names the part in
            the way.
        InvalidOption: the source is of another kind, ``dtype``/``device`` are given for a loaded model,
            ``attention`` cannot be had, there is nothing to split a model over, or nothing recorded to ``compile``.
    """
    if compile and (parallel or graphs is False):
        raise InvalidOption(
            "compile=True compiles passes of recorded cycles, and none are recorded with "
            f"{'parallel=True' if parallel else 'graphs=False'}: leave one of the two out"
        )
    if parallel:
        return _split(source, dtype, device, attention, name)
    model, tokenizer = checkpoint(source, dtype=dtype, device=device, name=name)
    if isinstance(source, (str, Path)):
        loaded = _wrap(model, tokenizer, name or _title(source), attention, batch_invariant, graphs, compile)
        options = {
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "name": name,
            "batch_invariant": batch_invariant,
            "graphs": graphs,
            "compile": compile,
        }
        loaded.recipe = Recipe(source, options)
        return loaded
    return _wrap(
        structural_copy(model), tokenizer, name or _name_of(model), attention, batch_invariant, graphs, compile
    )


def _split(
    source: Source, dtype: torch.dtype | None, device: str | torch.device | None, attention: AttentionName | None,
    name: str | None,
) -> LanguageModel:  # fmt: skip
    """A checkpoint's part on this rank; the whole checkpoint where there is one rank."""
    if not isinstance(source, (str, Path)) or device is not None:
        raise InvalidOption(
            "parallel=True reads each process's part of a checkpoint, given by name or folder, to the process's own "
            "device: leave device= out, and do not load the model first"
        )
    ranks = joined()
    if ranks.size == 1:
        return load(source, dtype=dtype, attention=attention, name=name)
    model, tokenizer = _load_checkpoint(source, dtype, None, name, ranks)
    return _wrap(model, tokenizer, name or _title(source), attention, False, False, False, ranks)


def checkpoint(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """The transformers model and the tokenizer, if any, that a source of :func:`load` stands for.

    Raises:
        UnsupportedModel, InvalidOption: as :func:`load` does.
    """
    if isinstance(source, (str, Path)):
        return _load_checkpoint(source, dtype, device, name)
    model, tokenizer = source if isinstance(source, tuple) else (source, None)
    _check_kind(model)
    if is_split(model):
        raise InvalidOption("the model is split over processes already: give its name or folder, and parallel=True")
    _check_device(model.device, name or _name_of(model))
    if dtype is not None or device is not None:
        raise InvalidOption("a loaded model keeps its dtype and device: move it first, or load it by name")
    return model, tokenizer


def _check_kind(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InvalidOption(
            "load takes a name, a folder, 'demo', a loaded transformers model, or (model, tokenizer); "
            f"got {type(model).__name__}"
        )


def _check_device(device: torch.device, name: str) -> None:
    if device.type not in DEVICES:
        raise UnsupportedModel(
            f"{name} lies on {device}, and the engine runs on {' and '.join(DEVICES)} only: "
            "give device=, or move a loaded model with .to('cpu')"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidOption(f'{name} should run on {device}, but torch finds no CUDA GPU: give device="cpu"')


def _title(source: str | Path) -> str:
    return source if isinstance(source, str) and not Path(source).exists() else Path(source).name


def _load_checkpoint(
    source: str | Path, dtype: torch.dtype | None, device: str | torch.device | None, name: str | None,
    ranks: Ranks | None = None,
) -> tuple[PreTrainedModel, Any]:  # fmt: skip
    folder, name = demo_folder() if source == "demo" else source, name or _title(source)
    config = AutoConfig.from_pretrained(folder)
    check_config(config, name)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check_device(place, name)
    if ranks is not None:
        check_heads(config, ranks.size, name)
        return load_split(folder, dtype or _default_dtype(config, place), ranks.size, name).eval(), _tokenizer(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or _default_dtype(config, place))
    except SafetensorError as error:
        raise UnsupportedModel(f"{name} cannot be loaded: {damage(folder) or error}") from error
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UnsupportedModel(f"{name} ({type(config).__name__}) has no causal language model") from error
    return model.to(place).eval(), _tokenizer(folder)


def _tokenizer(folder: str | Path) -> Any:
    """The checkpoint's tokenizer; None for a local folder that holds none."""
    local = Path(folder)
    if local.is_dir() and not any(local.glob("tokenizer*")) and not any(local.glob("vocab*")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def _default_dtype(config: Any, device: torch.device) -> torch.dtype:
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    own = getattr(torch, own) if isinstance(own, str) else own
    return own if device.type != "cpu" or (own == torch.bfloat16 and _quick_bfloat16()) else torch.float32


def _quick_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(torch.cpu._is_avx512_bf16_supported() or features.get("amx_bf16") or features.get("arm_bf16"))


def _name_of(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def attention_of(choice: AttentionName | None, device: torch.device, dtype: torch.dtype, name: str) -> Attention:
    """The way to attend that was chosen, or that a device and a type of numbers call for.

    Raises:
        InvalidOption: it cannot be had; the message names the remedy.
    """
    if choice is not None and choice not in get_args(AttentionName):
        raise InvalidOption(f'attention must be "torch" or "flashinfer"; got {choice!r}')
    if choice == "torch" or (choice is None and device.type == "cpu"):
        return TorchAttention()
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise InvalidOption(
            f"{name} is {dtype} on {device}, and FlashInfer attends on a GPU in float16 or bfloat16: "
            'give attention="torch", or another device= or dtype='
        )
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        raise InvalidOption(
            f"{name} on {device} attends by FlashInfer, which does not import ({error}): pip install 'smcdecode[gpu]', "
            'or give attention="torch", which is slower'
        ) from error
    return FlashInfer(library, device)


def _wrap(
    module: PreTrainedModel, tokenizer: Any, name: str, choice: AttentionName | None, batch_invariant: bool,
    graphs: bool | None, compile: bool, ranks: Ranks | None = None,
) -> LanguageModel:  # fmt: skip
    graphs = module.device.type == "cuda" if graphs is None else graphs
    if compile and not graphs:
        raise InvalidOption(
            f"compile=True compiles passes of recorded cycles, and {name} on {module.device} records none by default: "
            "give graphs=True as well, or leave compile= out"
        )
    attention = attention_of(choice, module.device, module.dtype, name)
    parameters = sum(tensor.numel() for tensor in module.parameters())  # before they are packed
    found = examine(module, name, attention, pack=not compile)
    eos = _eos_ids(module, tokenizer)
    if tokenizer is None:
        ends = frozenset(i for i in eos if i < found.width)
        vocabulary = Vocabulary(found.width, ends, None, ends, name)
    else:
        vocabulary = Vocabulary.from_tokenizer(tokenizer, eos, found.width)
    return LanguageModel(
        found.module,
        name=name,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        context=context_of(module.config),
        layout=found.layout,
        cuts=found.cuts if batch_invariant else None,
        parameters=parameters,
        attention=attention,
        ranks=ranks,
        graphs=graphs,
        compile=compile,
    )


def _eos_ids(module: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: the generation config's, else the config's, else the tokenizer's."""
    for holder in (module.generation_config, module.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, Iterable) else [found])
    return frozenset()
