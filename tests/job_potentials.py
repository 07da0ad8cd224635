"""Potentials that jobs load by this file's name; some of them fail."""

import os
import time

import smcdecode as smc


@smc.potential
def calm(text):
    """Never fails."""
    return -1.0 * text.count("b")


@smc.potential
def slow(text):
    """Takes its time."""
    time.sleep(0.03)
    return calm.fn(text)


@smc.potential
def moody(text, *, prompt):
    """Fails at some prompts: raises, computes for ever, sleeps for ever."""
    match prompt:
        case "ba":
            raise RuntimeError("a bad day")
        case "ca":
            while True:
                pass
        case "da":
            time.sleep(1e9)
    return calm.fn(text)


@smc.potential
def fatal(text, *, prompt):
    """Ends its process at one prompt."""
    if prompt == "ba":
        os._exit(9)
    return calm.fn(text)
