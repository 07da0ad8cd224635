# %% [markdown]
# # Constrained extraction, and what the weights tell
#
# A model reads a sentence and writes JSON. The schema is a hard constraint: whatever comes out is valid. What a
# schema cannot say is whether the values are *right*; but the posterior tells how sure the model is of each.

# %%
import json
from collections import Counter

import smcdecode as smc

p = smc.load("demo")
prompt = """Text: John Smith, 52, flew from Boston to Oslo.
JSON: {"name": "John Smith", "to": "Oslo"}
Text: Maria Rossi, 34, moved from Turin to Lisbon.
JSON: """
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "to": {"enum": ["Lisbon", "Turin", "Oslo", "Boston"]}},
    "required": ["name", "to"],
    "additionalProperties": False,
}
out = smc.sample(p * smc.JsonSchema(schema), prompt, method=smc.SMC(particles=8), max_tokens=32, seed=0)
for text, weight in out.distribution().items():
    print(f"{weight:.3f} {text}")

# %% [markdown]
# Every text is valid JSON of the schema; that is a promise, not a hope.

# %%
for text in out.distribution():
    assert set(json.loads(text)) == {"name", "to"}

# %% [markdown]
# ## One field at a time
#
# Texts that agree on a field count together, so the posterior of a *field* is a sum of weights. Where it is near one
# the model is sure; where it is spread out, ask a person.


# %%
def field(name):
    belief = Counter()
    for text, weight in out.distribution().items():
        belief[json.loads(text)[name]] += weight
    return belief


for name in ("name", "to"):
    print(name, {value: round(weight, 3) for value, weight in field(name).most_common()})
assert abs(sum(field("to").values()) - 1) < 1e-9

# %% [markdown]
# ## What the constraint cost
#
# `log_z` estimates log p(valid): how likely the model was to write such JSON by itself. A very low number says that
# the prompt does not ask clearly for what the schema demands, and that a better prompt is worth more than more
# particles.

# %%
print(f"log p(valid) ≈ {out.log_z:.2f}")
print(out.summary())

# %% [markdown]
# A mask without weights would have written the same texts, and would have said nothing of all this: see
# [Constraints](../constraints.md#masking-alone-samples-the-wrong-law). To see which beginnings were tried and
# dropped, write `out.to_html("run.html")`.
