"""Openings that a target continues when it writes its own training text. Knows sentences; no model, no tensor."""

import itertools
import random

__all__ = ["seed_prompts"]

REQUESTS = (
    "What is {}?", "Explain {} to a child.", "Write a short story about {}.", "Give me five facts about {}.",
    "Summarise the history of {}.", "Write a poem about {}.", "What are the advantages and disadvantages of {}?",
    "How do I learn about {}?", "Write an email to a friend about {}.",
    "List three questions about {} and answer them.",
    "Compare {} with something similar.", "Write a news article about {}.", "Why is {} important?",
    "Write a Python function that has to do with {}.", "Give step-by-step instructions that involve {}.",
    "Write a dialogue between two people who disagree about {}.", "What would the world be like without {}?",
    "Solve a small arithmetic problem about {}, step by step.", "Describe {} in one paragraph.",
)  # fmt: skip
OPENINGS = (
    "The most important thing about {} is", "Once upon a time, {}", "In this article we look at {}.", "# {}\n\n",
    "Question: what is {}?\nAnswer:", "A brief history of {}:", "Dear Sir or Madam,\n\nI am writing about {}",
    "def main():\n    \"\"\"Something about {}.\"\"\"\n",
    "Three reasons to care about {} are", "When I first heard of {},",
    "Here is a list about {}:\n1.", "\"{}\" is a word that", "Scientists who study {} have found that",
)  # fmt: skip
TOPICS = (
    "the sea", "bread", "volcanoes", "chess", "the city of Rome", "jazz", "taxes", "cats", "the Moon", "electricity",
    "football", "a library", "photosynthesis", "trains", "money", "rain", "the human heart", "gardens", "computers",
    "democracy", "a mountain village", "coffee", "prime numbers", "painting", "bees", "friendship", "the Industrial "
    "Revolution", "vaccines", "a lost key", "glaciers", "cooking for six people", "Shakespeare", "sleep", "oil",
    "bicycles", "black holes", "schools", "a sorted list", "languages", "dinosaurs", "the weather tomorrow", "salt",
    "primary colours", "a job interview", "robots", "the capital of France", "music lessons", "forests", "a hash table",
    "medicine", "holidays", "war and peace", "the ocean floor", "shoes", "probability", "fire", "a small business",
    "elephants", "time", "the internet", "rivers", "honesty", "birds", "a telescope", "sugar", "old age", "maps",
)  # fmt: skip


def seed_prompts(chat: bool, seed: int) -> list[str | list[dict[str, str]]]:
    """Prompts of many kinds, in an order drawn from the seed: plain openings, and user messages if ``chat``."""
    openings: list[str | list[dict[str, str]]] = [
        form.format(topic) for form, topic in itertools.product(OPENINGS, TOPICS)
    ]
    requests: list[str | list[dict[str, str]]] = [
        [{"role": "user", "content": form.format(topic)}] for form, topic in itertools.product(REQUESTS, TOPICS)
    ]
    order = random.Random(seed)
    order.shuffle(openings)
    order.shuffle(requests)
    if not chat:
        return openings
    return [prompt for pair in zip(openings, requests, strict=False) for prompt in pair]
