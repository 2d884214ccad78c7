# The rules for secrets and personal data against the forms that providers' tokens have now, and against what is as
# random and no secret: both rates are in docs/safety.md.

from __future__ import annotations

from gateway.moderation.classifier.hidden import hidden
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules.rules import find_by_rules
from tests.support.secret_forms import harmless, tokens


def found(text: str) -> set[str]:
    shown = plain(text)
    found = [finding for one in (shown, *hidden(shown)) for finding in find_by_rules(one)]
    return {finding.name for finding in found if finding.group != "contacts"}


def test_tokens_of_providers_are_found_by_their_forms() -> None:
    """Whatever they are made of; a value with no form of its own, one in a while, has no digit in it."""
    missed = [name for seed in range(5) for name, token in tokens(seed) if not found(f"It says 401 for {token} here.")]

    assert len(missed) <= 5 and len(set(missed)) == len(missed), missed


def test_what_is_random_and_no_secret_passes() -> None:
    """Ids, hashes, locks, logs, pictures and names in code."""
    flagged = [(kind, found(text)) for seed in range(10) for kind, text in harmless(seed).items() if found(text)]

    assert flagged == []
