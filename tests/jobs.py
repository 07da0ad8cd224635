"""What tests of jobs share: a tiny checkpoint on disk that writes letters, prompts for it, and its answers."""

import json

from models import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmn"  # ids 2 to 15; id 1 ends a text


def checkpoint(folder, *, seed=0, shard=None):
    """A tiny model and a tokenizer of a letter a token, saved in a folder."""
    words = {"<unk>": 0, "</s>": 1, **{letter: i for i, letter in enumerate(LETTERS, start=2)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    tiny("llama", seed=seed, spread=0.4).save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return folder


def prompts(n):
    return [{"id": f"p{i}", "prompt": LETTERS[i % 14] + LETTERS[i * 5 % 14]} for i in range(n)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answers(folder):
    """All answers in a folder of lines, by id; each once."""
    held = [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]
    found = {answer["id"]: answer for answer in held}
    assert len(found) == len(held)
    return found
