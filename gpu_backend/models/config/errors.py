# What can be wrong with a model.

from __future__ import annotations


class UnsupportedModel(Exception):
    """The checkpoint cannot be served; the message says what is wrong and what would be right."""
