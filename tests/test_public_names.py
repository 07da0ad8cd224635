"""The public names are these and no others, and each says what it is."""

import ast
import inspect

import pytest
from test_imports import FILES

import smcdecode as smc

NAMES = [
    "SMC",
    "After",
    "Autoregressive",
    "BasePotential",
    "Between",
    "Draft",
    "DraftProcessError",
    "ExactAnswer",
    "Grammar",
    "InvalidOption",
    "InvalidWeight",
    "JsonSchema",
    "LayerSkip",
    "Local",
    "MultiDraft",
    "NoSurvivors",
    "OutOfPages",
    "OutputError",
    "Plan",
    "Posterior",
    "Potential",
    "PotentialError",
    "Predicate",
    "PromptError",
    "PromptLookup",
    "RankError",
    "Regex",
    "Reward",
    "SMCDecodeError",
    "Saguaro",
    "Speculative",
    "Stream",
    "SupportError",
    "Target",
    "UnsupportedGrammar",
    "UnsupportedModel",
    "UnsupportedTarget",
    "VocabularyMismatch",
    "check_potential",
    "distill",
    "exact",
    "generate",
    "load",
    "plan",
    "potential",
    "remote",
    "sample",
    "stream",
]


def test_the_public_names():
    assert sorted(smc.__all__) == sorted(NAMES)
    assert all(hasattr(smc, name) for name in NAMES)


def public_members(cls):
    return [
        m for n, m in vars(cls).items() if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, property))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_and_its_methods_say_what_they_are(name):
    thing = getattr(smc, name)
    assert inspect.getdoc(thing)
    for member in public_members(thing) if inspect.isclass(thing) else ():
        assert inspect.getdoc(member), f"{name}.{getattr(member, '__name__', member)} has no docstring"


def test_every_error_is_of_one_tree():
    errors = [thing for name in NAMES if inspect.isclass(thing := getattr(smc, name)) and issubclass(thing, Exception)]
    assert all(issubclass(error, smc.SMCDecodeError) for error in errors)


@pytest.mark.parametrize("name", FILES)
def test_a_module_says_what_it_exports_and_documents_it(name):
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name} has no docstring"
    definitions = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}  # last of overloads
    exported = next((ast.literal_eval(n.value) for n in tree.body if is_all(n)), None)
    if exported is None:
        assert not definitions, f"{name} has no __all__"
        return
    assert exported == sorted(exported, key=order), f"__all__ of {name} is not sorted"
    for public in exported:
        if public in definitions:
            assert ast.get_docstring(definitions[public]), f"{name}.{public} has no docstring"


def is_all(node):
    return isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]


def order(name):
    """Constants, classes, the rest: as ruff sorts them."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)
