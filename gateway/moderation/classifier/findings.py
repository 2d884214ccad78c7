# What a check found, by name. Never the text itself.

from __future__ import annotations

from typing import NamedTuple

# Of rules; the classifiers' findings are of the group "category", an outside checker's of the group "checker".
GROUPS = ("secrets", "personal_data", "contacts", "deny", "unreadable", "checker")


class Finding(NamedTuple):
    """One thing that was found. ``score``: 0..1; 1 for what is certain."""

    name: str
    group: str
    score: float = 1.0
