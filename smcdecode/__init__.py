"""Sample from what you mean: sequential Monte Carlo decoding of language models."""

from smcdecode.declare.method import SMC, Autoregressive
from smcdecode.declare.proposal import Draft, Local, PromptLookup
from smcdecode.declare.target import Target
from smcdecode.declare.verification import MultiDraft, Saguaro, Speculative
from smcdecode.distill.distill import distill
from smcdecode.engine.layers import LayerSkip
from smcdecode.engine.load import load
from smcdecode.engine.remote.process import remote
from smcdecode.errors import (
    DraftProcessError,
    InvalidOption,
    InvalidWeight,
    NoSurvivors,
    OutOfPages,
    OutputError,
    PotentialError,
    PromptError,
    RankError,
    SMCDecodeError,
    SupportError,
    UnsupportedGrammar,
    UnsupportedModel,
    UnsupportedTarget,
    VocabularyMismatch,
)
from smcdecode.exact import exact
from smcdecode.integrations.transformers import generate
from smcdecode.planner.measure import plan
from smcdecode.planner.plan import Plan
from smcdecode.potentials.contract import check_potential
from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.potential import BasePotential, Potential
from smcdecode.potentials.predicate import Predicate
from smcdecode.potentials.reading import potential
from smcdecode.potentials.regex import Regex
from smcdecode.potentials.regions import After, Between
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.schema import JsonSchema
from smcdecode.report.chain import ExactAnswer
from smcdecode.report.posterior import Posterior
from smcdecode.sample import sample
from smcdecode.stream import Stream, stream

__all__ = [
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
