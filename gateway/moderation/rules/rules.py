# Rules for what can be told by its form: secrets, numbers that belong to one person, ways to reach one, and the phrases
# that the deployment forbids. Each rule has words that its text must hold, which costs next to nothing to look for;
# only then its pattern runs. Every pattern is linear: what repeats is bounded, or cannot be matched in two ways.

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from typing import Literal, NamedTuple

from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules.genuine import (
    has_card,
    is_assigned,
    is_bearer,
    is_iban,
    is_ip,
    is_login,
    is_phone,
    is_random,
    is_said_card,
    is_us_ssn,
)

Group = Literal["secrets", "personal_data", "contacts"]


class Rule(NamedTuple):
    """One thing to find. ``marks``: one of these stands in every text that has it. ``before``: how many characters
    before a match belong to what is found; a pattern that begins with a digit (``[0-9]``: in a plain text there
    are no others) is sought several times faster than one that begins with any letter. ``in_run``: whether a mark
    always stands in ``LONG_RUN`` letters, digits and ``_-.`` without a break, which few texts have."""

    name: str
    group: Group
    marks: tuple[str, ...]
    pattern: re.Pattern[str]
    is_real: Callable[[str], bool] = lambda found: True
    before: int = 0
    in_run: bool = False


def find_by_rules(text: str) -> list[Finding]:
    """Return what ``RULES`` find in a plain text, each rule once."""
    due: set[int] = set()
    for sign, marked in _BY_SIGN:
        if sign in text:
            for mark, rules in marked:
                if mark in text:
                    due |= rules
    data = text.encode("utf-8", "replace")
    if _LONG_RUN in data.translate(_AS_RUN):
        runs = b" ".join(run for run in data.translate(_RUN_ALONE).split() if len(run) >= LONG_RUN)
        due.update(place for start, place in _BY_START if start in runs)
    return [Finding(rule.name, rule.group) for rule in map(RULES.__getitem__, sorted(due)) if _holds(text, rule)]


def _holds(text: str, rule: Rule) -> bool:
    matches = rule.pattern.finditer(text)
    return any(rule.is_real(text[match.start() - rule.before : match.end()]) for match in matches)


def holds_phrase(text: str, phrases: Iterable[str]) -> bool:
    """Whether a text holds one of the forbidden phrases, in any case and spacing, look-alikes undone in either."""
    said = foldings(text)
    return any(phrase in one for phrase in phrases for one in said)


def foldings(text: str) -> set[str]:
    """Return ``text`` without case, runs of space and look-alikes. What a letter looks like may hang on its case, so
    there are two ways."""
    if text.isascii():
        return {" ".join(text.lower().split())}
    return {" ".join(one.split()) for one in (plain(text).casefold(), plain(text.casefold()))}


def _tokens(kinds: dict[str, dict[str, str]], is_real: Callable[[str], bool] = lambda found: True) -> Iterator[Rule]:
    """Yield a rule for each start of a token. None begins inside a word, though an escaped line break or tab before it
    ends in a letter."""
    for name, rests in kinds.items():
        for start, rest in rests.items():
            begun = rf"{re.escape(start)}(?<![A-Za-z0-9](?<!\\[nrtbfv]).{{{len(start)}}})"
            yield Rule(name, "secrets", (start,), re.compile(begun + rest), is_real, in_run="+/" not in rest)


def _secret(name: str, marks: str, pattern: str, is_real: Callable[[str], bool] = lambda found: True) -> Rule:
    return Rule(name, "secrets", tuple(marks.split()), re.compile(pattern), is_real)


_STARTS = tomllib.loads((files("gateway") / "moderation" / "rules" / "tokens.toml").read_text())
_DIGITS = tuple("0123456789")
# A row of digits, spaces and hyphens, or four groups with another sign between.
_CARD_LIKE = (  # but no digits of a hash or UUID
    r"[0-9](?<!\d\d)(?:(?<!\.\d)(?<![0-9a-f-]{7}[a-f].)(?:[ -]{0,2}\d){11,31}(?!\d|[a-f][0-9a-f-]{7})"
    r"|(?<!\d[._/,\n]\d)\d{3}([._/,\n])\d{4}\1\d{4}\1\d{4}(?!\1?\d))"
)
RULES = (
    _secret("aws_key", "AKIA ASIA", r"(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Z0-9])"),
    _secret("github_token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50}"),
    _secret("slack_token", "xox xapp-", r"xox[abeoprs]-[A-Za-z0-9-]{10}|xapp-\d-[A-Za-z0-9-]{10}"),
    _secret("slack_webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w{6}"),
    _secret("stripe_key", "k_live_ k_test_", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16}"),
    _secret("anthropic_key", "sk-ant-", r"sk-ant-[\w-]{20}"),
    _secret("google_token", "ya29. GOCSPX-", r"ya29\.[\w-]{20}|GOCSPX-[\w-]{20}"),
    _secret("pypi_token", "pypi-", r"pypi-[\w-]{50}"),
    _secret("telegram_token", ":AA", r"(?<!\d)\d{8,10}:AA[\w-]{33}"),
    _secret("digitalocean_token", "doo_v1_ dop_v1_ dor_v1_", r"do[opr]_v1_[0-9a-f]{32}"),
    _secret("shopify_token", "shpat_ shpca_ shppa_ shpss_", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    _secret("azure_key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/=]{40}"),
    _secret("private_key", "PRIVATE KEY", r"-----BEGIN (?:[A-Z]{2,9} ){0,2}PRIVATE KEY(?: BLOCK)?-----"),
    _secret("private_key", "PuTTY-User-Key-File", r"PuTTY-User-Key-File-\d"),
    _secret("private_key", "PrivateKey", r"PrivateKey\s{0,3}=\s{0,3}[A-Za-z0-9+/]{43}="),  # WireGuard
    *_tokens(_STARTS["tokens"]),
    *_tokens(_STARTS["random_tokens"], is_random),
    *(_secret("service_token", mark, pattern) for mark, pattern in _STARTS["marked"].items()),
    _secret("bearer_token", "earer", r"[Bb]earer[ \t]{1,3}[\w.~+/-]{20,200}", is_bearer),
    _secret("basic_login", "asic ", r"[Bb]asic [A-Za-z0-9+/]{8,200}={0,2}(?![\w+/])", is_login),
    _secret(
        "basic_login", "auth", r"auth[\\\"']{1,4}: ?[\\\"']{1,4}[A-Za-z0-9+/]{8,200}={0,2}(?![\w+/])", is_login
    ),  # Docker
    _secret(  # Discord's, whose first part is a number in base64
        "service_token",
        ".",
        r"\.(?:(?<=[MNO][\w-]{23}.)|(?<=[MNO][\w-]{25}.))[\w-]{6}\.[\w-]{27,38}(?![\w-])",
        is_random,
    ),
    _secret("url_password", "://", r"://[^\s:/@]{0,64}:[^\s:/@]{3,128}@[\w.-]"),
    _secret(
        "assigned_secret",
        "= : =>",
        # From the letter on that is rarest elsewhere: password, secret, token, API key, access key, subscription key.
        r"[wWcCkK](?i:(?<=passw)(?:or)?d|(?<=sec)ret|(?<=tok)en"
        r"|(?:(?<=apik)|(?<=api[_-]k)|(?<=accessk)|(?<=access[_-]k)|(?<=subscription-k))ey)"
        r"\w{0,20}[\\\"']{0,3}[ \t]{0,3}(?:=>|:=|[:=])"
        r"[ \t]{0,3}[\\\"']{0,3}[\w+/=.~!@#$%^&*-]{16,200}+(?![(\[])",  # a call is code
        is_assigned,
    ),
    Rule("card", "personal_data", _DIGITS, re.compile(_CARD_LIKE), has_card),
    Rule(
        "card",
        "personal_data",
        ("card", "Card", "CARD"),
        re.compile(r"(?:card|Card|CARD)[^\d\n]{0,24}[0-9]{12,19}(?!\d)"),
        is_said_card,
    ),
    Rule(
        "iban",
        "personal_data",
        _DIGITS,
        re.compile(
            r"[0-9](?<=[A-Za-z]{2}.)(?<![A-Za-z0-9](?<!\\[nrtbfv]).{3})"
            r"\d(?:[ -]?[A-Za-z0-9]{4}){2,7}[ -]?[A-Za-z0-9]{0,4}"
        ),
        is_iban,
        before=2,
    ),
    Rule(
        "us_ssn",
        "personal_data",
        _DIGITS,
        re.compile(r"[0-9](?<![\d-]\d)\d\d([-. ])\d\d\1\d{4}(?![\d-])"),
        is_us_ssn,
    ),
    Rule(
        "email",
        "contacts",
        ("@",),
        re.compile(r"@(?<=[\w.+-]@)(?<![\w.+-]{65}@)(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}"),
    ),
    Rule(
        "email",
        "contacts",
        tuple(a + at + b for at in ("at", "AT", "@") for a, b in ("()", "[]", "{}", "<>")),
        re.compile(  # from the bracket on: signs are rarer than letters
            r"[\[({<](?:(?<=[\w.+-].)|(?<=[\w.+-] .))(?:at|AT|@)[\])}>] ?[\w-]{1,63}"
            r"(?: ?(?:\.|[\[({<](?:dot|DOT|\.)[\])}>]) ?[\w-]{1,63}){1,8}"
        ),
    ),
    Rule(
        "phone",
        "contacts",
        _DIGITS,
        re.compile(
            r"[0-9+(](?<![\w.+-](?<!\\[nrtbfv]).)"  # with a country's code, with an area's, or neither
            r"(?:(?:(?<=\+)|(?<=0)0)\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,5}"
            r"|(?<=\()\d{1,4}\)[ .-]?\d{2,5}|(?<=\d)\d{1,4})"
            r"(?:[ .-]\d{2,7}){1,4}(?![\w-])"
        ),
        is_phone,
    ),
    Rule("ip_address", "contacts", _DIGITS, re.compile(r"[0-9](?<![\d.]\d)\d{0,2}(?:\.\d{1,3}){3}(?![\d.])"), is_ip),
)

LONG_RUN = 20
_RUN_SIGNS = (string.ascii_letters + string.digits + "_-.").encode()
_RUN_ALONE = bytes(code if code in _RUN_SIGNS else ord(" ") for code in range(256))
_AS_RUN = bytes(ord("x") if code in _RUN_SIGNS else ord(" ") for code in range(256))
_LONG_RUN = b"x" * LONG_RUN
_BY_START = [(rule.marks[0].encode(), place) for place, rule in enumerate(RULES) if rule.in_run]

_USUAL = "zjqxkvbKSACyTPwgfmpcu.-dlhrsinaote "  # signs that texts often have, the rarer ones first


def _by_sign() -> tuple[tuple[str, tuple[tuple[str, set[int]], ...]], ...]:
    """Return the rules by their marks, and these by their rarest sign: to look for one sign takes a tenth of the time
    of a mark."""
    found: dict[str, dict[str, set[int]]] = {}
    for place, rule in enumerate(RULES):
        for mark in () if rule.in_run else rule.marks:
            found.setdefault(min(mark, key=_USUAL.find), {}).setdefault(mark, set()).add(place)
    return tuple((sign, tuple(marked.items())) for sign, marked in found.items())


_BY_SIGN = _by_sign()
