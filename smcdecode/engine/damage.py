"""Which file of a checkpoint cannot be read. Knows files of weights; no model."""

from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

__all__ = ["damage"]


def damage(source: str | Path) -> str | None:
    """The first damaged file of a local folder or of a Hugging Face name, and what to do; None where all can be read.

    What is looked at is a file's table of contents and its length: weights of the right size but other bits are not
    found out.
    """
    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(str(source), local_files_only=True))
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{file} is damaged ({error}): delete it, and fetch or copy it again"
    return None
