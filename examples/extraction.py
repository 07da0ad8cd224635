"""Extraction to a JSON schema, with a reward on top: π ∝ p · 1[valid] · exp(β R), R = share of values found there."""

import json

import jsonschema
import numpy as np

import smcdecode as smc

SOURCE = "Maria Rossi, 34, moved from Turin to Lisbon in 2019."
PROMPT = f"""Text: John Smith, 52, flew from Boston to Oslo in 2004.
JSON: {{"name": "John Smith", "age": 52, "to": "Oslo"}}
Text: {SOURCE}
JSON: """

SCHEMA = {
    "title": "move",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "to": {"type": "string", "maxLength": 24},
    },
    "required": ["name", "age", "to"],
    "additionalProperties": False,
}


def grounded(text: str) -> float:
    """R: the share of the values that stand in the source word for word; 0 for a text that is no JSON yet."""
    try:
        values = json.loads(text).values()
    except ValueError:
        return 0.0
    return float(np.mean([str(value) in SOURCE for value in values]))


def main():
    """Extract with and without the reward; the same seed writes the same texts, only their weights differ."""
    p = smc.load("demo")
    valid = smc.JsonSchema(SCHEMA)
    method = smc.SMC(particles=8, threshold=0.0)  # no resampling, so that the two runs can be compared text by text
    plain = smc.sample(p * valid, PROMPT, method=method, max_tokens=48, seed=0)
    out = smc.sample(p * valid * smc.Reward(grounded, beta=4.0), PROMPT, method=method, max_tokens=48, seed=0)
    for text, weight in out.distribution().items():
        jsonschema.validate(json.loads(text), SCHEMA)
        print(f"{weight:.3f} R = {grounded(text):.2f} {text}")
    print(out.summary())

    assert out.tokens == plain.tokens
    assert out.expect(grounded) >= plain.expect(grounded)  # what the reward is for
    assert np.isclose(out.log_z - plain.log_z, np.log(plain.expect(lambda text: np.exp(4.0 * grounded(text)))))


if __name__ == "__main__":
    main()
