# How long the answers of the field's models can be, where the file does not say: the price library knows what a model
# costs and how much it reads, not how much it writes.

from __future__ import annotations

import re

from gateway.model_facts.claude_models import rules_of

# Tokens, thinking included, as the makers' pages on models have it (November 2026); the first that matches.
KNOWN = (
    (re.compile(r"\bgpt-5(?!.*-chat)"), 128_000),
    (re.compile(r"\bgpt-4\.1"), 32_768),
    (re.compile(r"\bo1-(?:mini|preview)"), 32_768),
    (re.compile(r"\bo[134](?:-|$)"), 100_000),
    (re.compile(r"\bgemini-(?:2\.5|[3-9])"), 65_536),
    (re.compile(r"\bgemini-[12]"), 8_192),
)


def longest_output(upstream_model: str) -> int | None:
    """Return the most tokens that an answer of the model can have, or ``None`` for a model that is not known."""
    known = next((most for pattern, most in KNOWN if pattern.search(upstream_model.lower())), None)
    return known or rules_of(upstream_model).max_output
