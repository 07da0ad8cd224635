"""Vocabulary against the tokenizers' own decoding: byte-level BPE, SentencePiece pieces, others, and holes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from smcdecode.engine.demo import demo_folder
from smcdecode.errors import PotentialError, UnsupportedModel, VocabularyMismatch
from smcdecode.potentials.vocabulary import Vocabulary, check_same

CORPUS = [
    "the theory of everything",
    "naïve café, “quoted” text",
    "日本語 the emoji 😀🙏 👩‍👩‍👧",
    "x = 1\n\n\tdef f():\n",
]
TEXTS = [*CORPUS, "", " ", "  two  spaces ", "é", "🙏", "a\x00b", "Ġ and ▁ in plain text"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(["<tool>", AddedToken("    ", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "t", "h", "e", "▁t", "he", "▁the", "o", "r", "y", "é", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


BYTE_LEVEL, PIECES = byte_level(), sentencepiece()


def vocabulary(tokenizer: PreTrainedTokenizerFast, size: int = 10**6, **options: str) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer, [tokenizer.eos_token_id], size, **options)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_is_the_text(text: str):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert vocabulary(BYTE_LEVEL).bytes_of(ids) == text.encode()


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=30))
@settings(max_examples=200, deadline=None)
def test_byte_level_agrees_with_decode_on_any_ids(ids: list[int]):
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert vocabulary(BYTE_LEVEL).text(ids) == expected


@pytest.mark.parametrize("text", [text for text in TEXTS if "▁" not in text])
def test_sentencepiece_text_is_the_text(text: str):
    ids = PIECES.encode(text, add_special_tokens=False)
    assert vocabulary(PIECES).bytes_of(ids) == (b" " + text.encode() if text else b"")


@given(st.lists(st.integers(259, len(PIECES) - 1), max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_agrees_with_decode_after_a_first_token(ids: list[int]):
    first = PIECES.convert_tokens_to_ids("t")
    expected = PIECES.decode([first, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "t" + vocabulary(PIECES).text(ids) == expected


def test_byte_pieces_are_bytes():
    tokens = vocabulary(PIECES).tokens
    assert tokens is not None
    assert [tokens[3 + b] for b in range(256)] == [bytes([b]) for b in range(256)]


def test_metaspace_decoder_is_sentencepiece():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁", -3.0)], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokens = Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [], 99).tokens
    assert tokens == (b"<unk>", b" a", b"b", b" ")


def test_other_tokenizers_are_read_through_decode():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "é": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    assert Vocabulary.from_tokenizer(fast, [], 99).tokens == (b"[UNK]", b" play", b"ing", " é".encode())


class Slow:
    """A tokenizer that is not of the tokenizers library."""

    def __init__(self, pieces: dict[str, int], special: dict[str, int]) -> None:
        self.pieces = pieces | special
        self.added_tokens_decoder = {i: AddedToken(piece, special=True) for piece, i in special.items()}
        self.all_special_ids = list(special.values())

    def get_vocab(self) -> dict[str, int]:
        return self.pieces

    def decode(self, ids: list[int], **options: bool) -> str:
        return "\N{REPLACEMENT CHARACTER}" * len(ids)


def test_a_tokenizer_that_hides_its_bytes_is_refused():
    with pytest.raises(UnsupportedModel, match="without a tokenizer"):
        Vocabulary.from_tokenizer(Slow({"ж": 0, "ю": 1}, {}), [], 10)


@pytest.mark.parametrize("pieces", [{"Ġa": 0, "Ċ": 1}, {"▁a": 0, "<0x0A>": 1}])
def test_a_tokenizer_without_a_decoder_is_read_by_its_pieces(pieces: dict[str, int]):
    assert Vocabulary.from_tokenizer(Slow(pieces, {}), [], 10).tokens == (b" a", b"\n")


def test_added_tokens_of_a_byte_level_tokenizer_are_plain_text():
    ids = BYTE_LEVEL.convert_tokens_to_ids(["<tool>", "    "])
    assert vocabulary(BYTE_LEVEL).bytes_of(ids) == b"<tool>    "


def test_special_tokens_have_a_name_and_no_text():
    words = vocabulary(BYTE_LEVEL)
    assert words.tokens is not None
    assert words.tokens[:2] == (b"<|end|>", b"<|start|>")
    assert words.special == {0, 1}
    assert words.text([0, 1]) == ""


def test_an_eos_that_is_an_ordinary_token_is_not_shown():
    newline = BYTE_LEVEL.encode("\n", add_special_tokens=False)[0]
    words = Vocabulary.from_tokenizer(BYTE_LEVEL, [0, newline], 10**6)
    assert words.eos == {0, newline}
    assert words.text([newline]) == ""


def test_size_is_the_smaller_of_tokenizer_and_logits():
    assert vocabulary(BYTE_LEVEL).size == len(BYTE_LEVEL)
    cut = Vocabulary.from_tokenizer(BYTE_LEVEL, [0, 399], 300)
    assert (cut.size, len(cut.tokens or ()), cut.eos) == (300, 300, {0})


def test_ids_that_the_tokenizer_leaves_out_are_special_and_empty():
    words = Vocabulary.from_tokenizer(Slow({"a": 0, "Ġb": 2}, {"</s>": 5}), [5], 10)
    assert words.tokens == (b"a", b"", b" b", b"", b"", b"</s>")
    assert words.special == {1, 3, 4, 5}


def test_an_unfinished_character_waits_for_its_end():
    words = Vocabulary(4, frozenset(), (b"\xf0\x9f", b"\x98\x80", b"a", b"\xff"), frozenset(), "bytes")
    assert words.text([2, 0], final=False) == "a"
    assert words.text([2, 0], final=True) == "a\N{REPLACEMENT CHARACTER}"
    assert words.text([2, 0, 1], final=False) == "a😀"
    assert words.text([3, 2, 0, 2], final=False) == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}a"


def test_without_a_tokenizer_there_is_no_text():
    words = Vocabulary(10, frozenset({1}), None, frozenset(), "tiny")
    with pytest.raises(PotentialError, match=r"tiny has no tokenizer.*on=\"tokens\""):
        words.text([1])
    assert repr(words) == "Vocabulary('tiny', size=10, eos=[1], ids only)"


def test_tokens_must_match_the_size():
    with pytest.raises(ValueError, match="2 tokens for a vocabulary of 3"):
        Vocabulary(3, frozenset(), (b"a", b"b"), frozenset(), "wrong")


def test_the_same_vocabulary_has_no_differences():
    target = vocabulary(BYTE_LEVEL)
    assert check_same(target, vocabulary(BYTE_LEVEL)) is target


def test_a_larger_draft_is_cut_and_a_smaller_one_is_refused():
    large, small = vocabulary(BYTE_LEVEL, name="large"), vocabulary(BYTE_LEVEL, 300, name="small")
    assert check_same(small, large) is small
    with pytest.raises(VocabularyMismatch, match=f"ids 300 to {large.size - 1} of large are unknown to small"):
        check_same(large, small)


def test_both_go_without_special_tokens_that_the_draft_lacks():
    eos, image = frozenset({0}), frozenset({0, 2})
    target = Vocabulary(3, eos, (b"<eos>", b"a", b"<image>"), image, "target")
    draft = Vocabulary(2, eos, (b"<eos>", b"a"), eos, "draft")
    assert check_same(target, draft) == Vocabulary(2, eos, (b"<eos>", b"a"), eos, "target")


def test_differences_are_listed_and_limited():
    target = Vocabulary(8, frozenset({0}), tuple(b"abcdefgh"[i : i + 1] for i in range(8)), frozenset({0}), "P")
    draft = Vocabulary(8, frozenset({1}), tuple(b"abXYZXYZ"[i : i + 1] for i in range(8)), frozenset({1}), "Q")
    assert target.differences(draft, limit=2) == ["id 2: b'c' in P, b'X' in Q", "id 3: b'd' in P, b'Y' in Q"]
    with pytest.raises(VocabularyMismatch) as caught:
        check_same(target, draft)
    assert "id 6: b'g' in P" in str(caught.value)
    assert "id 7" not in str(caught.value)
    assert "EOS" not in str(caught.value)


def test_vocabularies_without_bytes_are_compared_by_size():
    ids = Vocabulary(10, frozenset({1}), None, frozenset(), "ids")
    check_same(ids, Vocabulary(12, frozenset({1}), None, frozenset(), "more"))
    with pytest.raises(VocabularyMismatch, match="unknown to fewer"):
        check_same(ids, Vocabulary(9, frozenset({1}), None, frozenset(), "fewer"))


def test_the_demo_tokenizer():
    try:
        tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    except UnsupportedModel as error:
        pytest.skip(f"needs the demo model: {error}")
    words = Vocabulary.from_tokenizer(tokenizer, [tokenizer.eos_token_id], 49152)
    assert words.size == 49152
    for text in TEXTS:
        assert words.text(tokenizer.encode(text, add_special_tokens=False)) == text
    ids = list(range(17, 49152, 7))
    assert words.text(ids) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
