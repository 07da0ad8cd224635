"""Constraints by grammar, regex, schema and predicate: what is masked, what is weighed, what is refused."""

import doctest
import json
import math
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from lark import Lark
from pydantic import BaseModel, field_validator

from smcdecode.errors import InvalidOption, PotentialError, UnsupportedGrammar
from smcdecode.potentials import grammar as grammar_module
from smcdecode.potentials import predicate as predicate_module
from smcdecode.potentials import regex as regex_module
from smcdecode.potentials import regions as regions_module
from smcdecode.potentials import schema as schema_module
from smcdecode.potentials.contract import check_potential
from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.lexicon import lexicon_of
from smcdecode.potentials.potential import Prompt, allowed, evaluate
from smcdecode.potentials.predicate import Predicate
from smcdecode.potentials.reading import potential
from smcdecode.potentials.regex import Regex
from smcdecode.potentials.regions import After, Between
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.schema import JsonSchema
from smcdecode.potentials.vocabulary import Vocabulary

PROMPT = Prompt((), "")
MORE = (b"true", b"ab", b"ab", b"1/", b"**/", b"*2", b"</t>", b'"<', b"", b"1..", b"<pad>", b"<end>", b"<stop>")
TOKENS = (*(bytes([b]) for b in range(256)), *MORE)
PAD, END, STOP = (TOKENS.index(name) for name in (b"<pad>", b"<end>", b"<stop>"))
BYTES = Vocabulary(len(TOKENS), frozenset({END, STOP}), TOKENS, frozenset({PAD, END, STOP}), "bytes and more")


def ids(text):
    return list(text.encode())


def read(psi, text, vocabulary=BYTES):
    return psi.advance(psi.start(vocabulary, PROMPT), ids(text) if isinstance(text, str) else text)


def accepts(psi, text):
    """Whether Ψ > 0, and the masks let the text through."""
    state = psi.start(BYTES, PROMPT)
    for token in ids(text) if isinstance(text, str) else text:
        if not allowed(psi, [state], BYTES.size)[0, token]:
            assert psi.log_psi([psi.advance(state, [token])], [False]) == [-math.inf]
            return False
        state = psi.advance(state, [token])
    value = psi.log_psi([state], [True])[0]
    assert value in (0.0, -math.inf)
    assert allowed(psi, [state], BYTES.size)[0, END] or value == -math.inf
    return value == 0.0


def following(psi, text):
    """The single bytes that may follow, and "." in front where the text may end."""
    row = allowed(psi, [read(psi, text)], BYTES.size)[0]
    assert row[END] == row[STOP]
    return ("." if row[END] else "") + bytes(row[:128].nonzero()[:, 0].tolist()).decode()


# ---- traps


def test_nothing_is_forced():
    assert following(Grammar('start: "true"'), "") == "t"
    psi = Grammar('start: "true"')
    row = allowed(psi, [read(psi, "")], BYTES.size)[0]
    assert row[TOKENS.index(b"true")] and row[ord("t")]


def test_blanks_between_tokens_are_lark_s_and_after_the_last_only_if_wanted():
    text = 'start: A B\nA: "a"\nB: "b"\n%ignore /\\s+/'
    inside, loose = Grammar(text), Grammar(text, trailing_ignore=True)
    assert accepts(inside, " \n a \t b") and accepts(loose, " a b \n")
    assert following(inside, "ab") == "." and " " in following(loose, "ab")
    assert accepts(inside, "a" + " " * 500 + "b")


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("start: /[😀-🙏]+/", ["😀", "😁🙏"], ["", "é", "🚀"]),
        ('start: "<t>" /.+/ "</t>"', [], ["<t>ab</t>"]),  # the regex swallows the rest: so it does in Lark
        ('start: "<t>" /[^<]+/ "</t>"', ["<t>ab</t>"], ["<t></t>"]),
        ('start: INT ".." INT | FLOAT\nINT: /[0-9]+/\nFLOAT: /[0-9]+\\.[0-9]+/', ["1..2", "1.2", "10..20"], ["1."]),
        ('start: HEX | INT X\nHEX: /0x[0-9a-f]+/\nINT: /[0-9]+/\nX: "xy"', ["0xa", "0xy", "7xy"], ["0x", "07"]),
        ("start: A B\nA: /a+/\nB: \"ab\"", [], ["aab", "ab"]),
        ("start: (IF | NAME)+\nIF: \"if\"\nNAME: /[a-z]+/\n%ignore \" \"", ["if x", "iffy"], ["1"]),
        ("start: IF NAME\nIF: \"if\"\nNAME: /[a-z]+/\n%ignore \" \"", ["if x", "iffy"], ["if"]),
        ('start: STRING\nSTRING: /"[^"]*"/', ['"<pad>"', '"ab"', '"é"'], ['"']),
        ("start: a\na: a \"x\" | \"x\"", ["x" * 50], [""]),
        ("start: \"x\"~2..3", ["xx", "xxx"], ["x", "xxxx"]),
        ("start: /a.*?b/ \"c\"", ["abc", "axxbc"], ["abbc", "abcbc"]),
        ("start: /a|ab/ \"b\"", ["ab"], ["abb"]),
        ("start: /(?i:select)/ \"X\"i", ["SeLeCtx", "selectX"], ["selec"]),
        ("start: \"a/b\\\\c\" /[\\/\\-\\]\"]/", ['a/b\\c/', 'a/b\\c"', "a/b\\c]"], ["a/b\\c^"]),
        ("start: /\\w\\s\\d/", ["é 1", "_\u2003٣", "²\x1c1"], ["- 1", "a1 ", "a ²"]),
        ("start: WORD*\nWORD.2: /b+/\nOTHER: /[a-b]+/", ["bb", ""], ["a"]),
    ],
    ids=str,
)  # fmt: skip
def test_texts(text, good, bad):
    psi = Grammar(text)
    lark = Lark(text, parser="lalr")
    assert all(accepts(psi, t) for t in good), [t for t in good if not accepts(psi, t)]
    assert not any(accepts(psi, t) for t in bad), [t for t in bad if accepts(psi, t)]
    for t in good:
        lark.parse(t)


def test_a_token_may_end_inside_a_terminal():
    rules = 'start: INT (OP INT)*\nINT: /[0-9]+/\nOP: "*" | "/"\n'
    psi = Grammar(rules + 'COMMENT: "/*" /(.|\\n)*?/ "*/"\n%ignore COMMENT')
    assert accepts(psi, [TOKENS.index(t) for t in (b"1/", b"**/", b"*2")])
    assert accepts(psi, "1/**/*2") and not accepts(psi, "1/**/2") and not accepts(psi, "1/*2")


def test_left_recursion_unit_cycles_and_ambiguity():
    assert accepts(Grammar('start: a\na: a | "x"', parser="earley"), "x")
    psi = Grammar('start: e\ne: e "+" e | "1"')
    assert accepts(psi, "+".join("1" * 400)) and not accepts(psi, "1+")


def test_dead_end_dies_at_the_cap_and_not_before():
    psi = Grammar('start: A B\nA: /a+/\nB: "ab"')
    state = read(psi, "aaa")
    assert following(psi, "aaa") == "a"
    assert psi.log_psi([state, state], [False, True]) == [0.0, -math.inf]


def test_special_tokens_are_no_text():
    psi = Regex('"[^"]*"')
    row = allowed(psi, [read(psi, '"')], BYTES.size)[0]
    assert (
        not row[PAD] and not row[END] and not row[TOKENS.index(b"")] and row[ord("<")] and row[TOKENS.index(b'"<')] == 0
    )
    assert psi.log_psi([read(psi, [*ids('"'), PAD])], [False]) == [-math.inf]


def test_every_id_of_the_same_bytes_is_allowed():
    first, second = (i for i, token in enumerate(TOKENS) if token == b"ab")
    psi = Regex("abab")
    row = allowed(psi, [read(psi, "ab")], BYTES.size)[0]
    assert row[first] and row[second]
    assert accepts(psi, [first, second])


@pytest.mark.parametrize("size", [257, 300, len(TOKENS)])
def test_vocabularies_cut_by_the_logits(size):
    """A tokenizer larger than the logits: ids beyond them do not exist. Masks have the logits' width."""
    tokens = (*TOKENS[:256], b"<end>", *(b"x%d" % i for i in range(64)))[:size]
    vocabulary = Vocabulary(len(tokens), frozenset({256}), tokens, frozenset({256}), "cut")
    psi = Regex("x?1+")
    mask = allowed(psi, [read(psi, "x1", vocabulary)], vocabulary.size)
    assert mask.shape == (1, len(tokens))
    assert mask[0].nonzero()[:, 0].tolist() == [ord("1"), 256]


def test_a_vocabulary_without_an_end_and_one_without_bytes():
    endless = Vocabulary(256, frozenset(), TOKENS[:256], frozenset(), "endless")
    psi = Regex("ab")
    state = read(psi, "ab", endless)
    assert psi.log_psi([state], [True]) == [0.0] and not allowed(psi, [state], 256).any()
    with pytest.raises(PotentialError, match="no tokenizer"):
        psi.start(Vocabulary(9, frozenset({0}), None, frozenset(), "ids"), PROMPT)


def test_long_texts():
    psi = Regex('"[^"]*"')
    text = '"' + "xyzé" * 2500 + '"'
    assert psi.log_psi([read(psi, text)], [True]) == [0.0]
    state = read(psi, text[:-1])
    assert allowed(psi, [state], BYTES.size)[0, ord('"')]


def test_what_llguidance_gives_up_on_is_reported():
    psi = Grammar('start: a\na: "x" a | "x" a "y" | "x" a "z" | "x"')  # right recursion fills a row of the parser
    with pytest.warns(UserWarning, match="gave up"):
        state = read(psi, "x" * 900)
    assert psi.log_psi([state], [False]) == [-math.inf]
    assert "items" in psi.why(state, False)


def test_reasons():
    psi = Grammar('start: "a" "b"')
    assert psi.why(read(psi, "ab"), True) is None
    assert psi.why(read(psi, "a"), True) == "the text is unfinished"
    assert "does not allow" in psi.why(read(psi, "b"), False)
    loose = Grammar('start: IF NAME | NAME\nIF.2: "if"\nNAME: /[a-z]+/\n%ignore " "')
    assert loose.notes and loose.why(read(loose, "if"), True).startswith("Lark: ")


# ---- states


def test_states_are_shared_copied_on_divergence_and_rolled_back():
    """Whatever the order in which texts are read, each state says what a fresh one says."""
    psi = Grammar('start: e\ne: e OP e | "(" e ")" | /[a-z]+/\nOP: "+" | "->"\n%ignore " "')
    rng = random.Random(0)
    states = [psi.start(BYTES, PROMPT)]
    texts = [()]
    for _ in range(300):
        i = rng.randrange(len(states))
        row = allowed(psi, [states[i]], BYTES.size)[0] if rng.random() < 0.5 else torch.ones(256)
        token = rng.choice([t for t in (ids("a+->() b") + [ord("z")]) if row[t]] or [ord("!")])
        states.append(psi.advance(psi.fork(states[i]), [token]))
        texts.append((*texts[i], token))
    fresh = Grammar(psi.lark)
    for state, text in zip(states, texts, strict=True):
        other = fresh.advance(fresh.start(BYTES, PROMPT), text)
        for done in (False, True):
            assert psi.log_psi([state], [done]) == fresh.log_psi([other], [done]), text
        assert torch.equal(psi.mask([state]), fresh.mask([other])), text


def test_one_mask_for_each_distinct_text(monkeypatch):
    psi = Regex("a*b")
    texts = ["a", "aa", "a", "a", "aa"]
    roots = [psi.start(BYTES, PROMPT) for _ in texts]
    states = [psi.advance(root, ids(text)) for root, text in zip(roots, texts, strict=True)]
    counted = []
    lexicon = lexicon_of(BYTES)
    fill = lexicon.fill
    monkeypatch.setattr(lexicon, "fill", lambda matchers: counted.append(len(matchers)) or fill(matchers))
    mask = psi.mask(states)
    psi.mask(states)
    assert counted == [2] and torch.equal(mask[0], mask[3])
    assert mask.shape == (5, -(-BYTES.size // 32)) and mask.dtype == torch.int32


def test_grammars_are_compiled_once_a_vocabulary():
    first, second = Regex("[a-z]{3}"), Regex("[a-z]{3}")
    read(first, "a"), read(second, "b")
    assert list(lexicon_of(BYTES)._grammars).count(first.grammar) == 1


# ---- kinds


def test_grammars_come_as_text_path_or_lark(tmp_path):
    text = 'greeting: "hi" NAME\n%import .names.NAME'
    (tmp_path / "names.lark").write_text("NAME: /[a-z]+/")
    path = Path(tmp_path / "greeting.lark")
    path.write_text(text)
    assert accepts(Grammar(path, start="greeting"), "hibob")
    lark = Lark('a: "x"\nb: "y"', start=["a", "b"], parser="earley")
    assert accepts(Grammar(lark, start="b"), "y") and not accepts(Grammar(lark, start="a"), "y")
    with pytest.raises(InvalidOption, match="give one"):
        Grammar(lark)


def test_regexes_are_fullmatch():
    psi = Regex(re.compile(r"^(?:\d{3}|[a-c]+?)-x$", re.IGNORECASE))
    good, bad = ["123-x", "ABC-X", "٣٣٣-x"], ["12-x", "-x", "123-x\n", "123-xx"]
    assert all(accepts(psi, t) and psi.pattern.fullmatch(t) for t in good)
    assert not any(accepts(psi, t) or psi.pattern.fullmatch(t) for t in bad)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a.b", r"(?s)a.b", r"[^a]\Sb", r"(?i)straße|k", r"\x41\u00e9[\]\-^]", r"(a|ab)(c|bcd)?d*"),
        *(r"a{2,3}?b{,2}", r"(?a)\w+", "a|"),
    ],
)
def test_regexes_agree_with_python(pattern):
    psi, rng = Regex(pattern), random.Random(pattern)
    letters = "aAbBcdkKé-]^\nsS ß\u212a"
    for _ in range(150):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 5)))
        assert accepts(psi, text) == bool(re.fullmatch(pattern, text)), text
    if pattern == "(?i)straße|k":
        assert accepts(psi, "STRAßE") and accepts(psi, "\u212a")


SCHEMA = {
    "title": "person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"type": "array", "items": {"enum": ["a", 1]}}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_schemas():
    psi = JsonSchema(SCHEMA)
    good = ['{"name":"Bob"}', '{"name": "é\\n", "tags": ["a", 1]}', json.dumps({"name": "x", "tags": []}, indent=4)]
    bad = [
        '{"name":"Robert"}',
        "{}",
        '{"name":"x","age":1}',
        '{"name":"x"} ',
        ' {"name":"x"}',
        '{"name":  "x","tags":[NaN]}',
    ]
    assert all(accepts(psi, t) for t in good), [t for t in good if not accepts(psi, t)]
    assert not any(accepts(psi, t) for t in bad)
    assert psi.name == "person"


def test_blanks_in_json_are_bounded():
    texts = ['{"name":"x"}', '{"name": "x"}', '{"name":\n\n"x"}', '{"name":' + " " * 40 + '"x"}']
    assert [accepts(JsonSchema(SCHEMA), t) for t in texts] == [True, True, False, False]
    assert [accepts(JsonSchema(SCHEMA, whitespace=None), t) for t in texts] == [True] * 4
    assert [accepts(JsonSchema(SCHEMA, whitespace=""), t) for t in texts] == [True, False, False, False]


class Person(BaseModel):
    name: str
    age: int

    @field_validator("age")
    @classmethod
    def adult(cls, value):
        assert value >= 18
        return value


def test_pydantic_models_validate_too():
    psi = JsonSchema(Person)
    assert accepts(psi, '{"name":"x","age":20}')
    assert not accepts(psi, '{"name":"x","age":2}')
    assert psi.why(read(psi, '{"name":"x","age":2}'), True).startswith("pydantic: ")
    assert psi.name == "Person"


def test_predicates():
    whole, every = Predicate(lambda text: len(text) == 2), Predicate(lambda text: "b" not in text, on="text")
    assert evaluate(whole, [read(whole, t) for t in ("a", "ab")], [True, True]).tolist() == [-math.inf, 0.0]
    assert evaluate(whole, [read(whole, "a")], [False]).tolist() == [0.0]
    assert evaluate(every, [read(every, t) for t in ("a", "ab")], [False, False]).tolist() == [0.0, -math.inf]
    batched = Predicate(lambda texts: torch.tensor([t == "a" for t in texts]), batched=True)
    assert evaluate(batched, [read(batched, t) for t in ("a", "b")], [True, True]).tolist() == [0.0, -math.inf]
    asked = Predicate(lambda text, prompt: text == prompt)
    state = asked.advance(asked.start(BYTES, Prompt((), "hi")), ids("hi"))
    assert evaluate(asked, [state], [True]).tolist() == [0.0]
    assert every("ab") is False


@pytest.mark.parametrize("answer", [1, None, "yes", 0.0])
def test_predicates_say_yes_or_no(answer):
    psi = Predicate(lambda text: answer, name="odd")
    with pytest.raises(PotentialError, match=r"predicate 'odd' returned .* True or False"):
        evaluate(psi, [read(psi, "a")], [True])


def test_wrong_predicates():
    with pytest.raises(InvalidOption, match="on='tokens'"):
        Predicate(len, on="tokens")
    short = Predicate(lambda texts: [True], batched=True)
    with pytest.raises(PotentialError, match="2 booleans"):
        evaluate(short, [read(short, t) for t in "ab"], [True, True])
    broken = Predicate(lambda text: 1 / 0, name="broken")
    with pytest.raises(PotentialError, match="'broken' raised ZeroDivisionError"):
        evaluate(broken, [read(broken, "a")], [True])


# ---- refusals, at declaration time


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("start: x"), "Lark refuses the grammar: .*x"),
        (lambda: Grammar("start: /a(/"), "Lark refuses the grammar"),
        (lambda: Grammar('start: a\na: a "x"'), "language of rule 'start' is empty"),
        (lambda: Grammar("start: A\nA: /[a-z]/\nB.2: /./", start="b"), "Lark refuses"),
        (lambda: Grammar('start: a\na: a | "x"'), "parser='earley'"),
        (lambda: Grammar('%declare INDENT\nstart: INDENT "a"'), "terminal INDENT is only %declare-d"),
        (lambda: Grammar("start: WORD\nWORD: /a(?=b)/"), "terminal WORD .*lookahead or lookbehind.*; write"),
        (lambda: Grammar("start: WORD\nWORD: /(?<!b)a/"), "terminal WORD .*negative look.*; write"),
        (lambda: Grammar("start: WORD\nWORD: /(a)\\1/"), "terminal WORD .*backreference.*; write"),
        (lambda: Grammar("start: WORD\nWORD: /a\\b/"), "terminal WORD .*word boundary.*; leave it out"),
        (lambda: Grammar("start: WORD\nWORD: /(a|ab)+c?/"), "terminal WORD.*longer one first"),
        (lambda: Grammar("start: WORD\nWORD: /(a.*?b)+c?/"), "terminal WORD.*lazy repeat inside a group"),
        (lambda: Grammar(Lark('start: "a"', lexer="dynamic_complete")), "dynamic_complete"),
        (lambda: Grammar(Lark('start: "a"', parser="lalr", lexer_callbacks={"A": lambda t: t})), "lexer_callbacks"),
        (lambda: Grammar(Lark('start: "a"', parser="lalr", use_bytes=True)), "use_bytes"),
        (lambda: Regex("a("), "no regex of Python's re module"),
        (lambda: Regex("a(?!b)"), "negative lookahead"),
        (lambda: Regex("a++"), "possessive"),
        (lambda: Regex("a^b"), "anchor"),
        (lambda: Regex("[a-z]\ud800"), "surrogate"),
        (lambda: JsonSchema({"type": "strin"}), "no JSON schema"),
        (lambda: JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: JsonSchema({"type": "integer", "minimum": 3, "maximum": 2}), "JSON schema"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UnsupportedGrammar, match=message):
        make()


def test_wrong_arguments():
    for make in (lambda: Grammar(3), lambda: Grammar("start: A", parser="cyk"), lambda: JsonSchema("{}")):
        with pytest.raises(InvalidOption):
            make()


# ---- the contract


def letters_only(text):
    return text.isalpha() or not text


CONTEXTS = [
    *map(ids, ("", "ab", "a+b", "aab", '{"n":1}', '{"n": 12}', "x:a+b", "x<a>y<a>", "é😀", "😀", "x:x:a", "a<a>b<")),
    *([PAD, *ids("ab")], [*ids("x<a"), TOKENS.index(b"</t>")], [TOKENS.index(b"ab"), END]),
]
BUILT_IN = [
    Grammar('start: NAME ("+" NAME)*\nNAME: /[a-z]+/\n%ignore " "'),
    Grammar('start: "a" start? "b"', parser="earley"),
    Grammar("start: /[😀-🙏]+/"),
    Regex("(a|b)*"),
    JsonSchema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    Predicate(letters_only, on="text"),
    Predicate(lambda text: len(text) == 2, name="two"),
    After(":", Grammar('start: /[a-z]/ ("+" /[a-z]/)*')),
    After(":", Predicate(letters_only, on="text")),
    Between("<", ">", Regex("a+")),
    Between("a", "b", Reward(len, beta=0.5), required=False),
    Regex("[a-z]*") * Regex("(ab)*") * Predicate(letters_only, on="text") * Reward(len, beta=1.0),
    After("x", Between("<", ">", Regex("a")) * potential(lambda text: -float(len(text)))),
]


@pytest.mark.parametrize("psi", BUILT_IN, ids=lambda psi: psi.name[:40])
def test_every_constraint_keeps_the_contract(psi):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_potential(psi, BYTES, CONTEXTS)


@pytest.mark.parametrize("module", [grammar_module, regex_module, schema_module, predicate_module, regions_module])
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0
