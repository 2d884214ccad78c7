# Rules for what can be told by its form: secrets, numbers that belong to one person, ways to reach one, and the
# phrases that the house forbids. Each rule has words that its text must hold, which costs next to nothing to look for;
# only then its pattern runs. Every pattern is linear: what repeats is bounded, or cannot be matched in two ways.

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from gateway.safety.findings import Finding
from gateway.safety.plain import plain

Group = Literal["secrets", "personal_data", "contacts", "deny"]


Marks = tuple[tuple[str, tuple[str, ...]], ...]  # each sign with the marks that have it


class Rule(NamedTuple):
    """One thing to find. ``marks``: one of these stands in every text that has it."""

    name: str
    group: Group
    marks: Marks
    pattern: re.Pattern[str]
    is_real: Callable[[str], bool] = lambda found: True


def find_by_rules(text: str, rules: Iterable[Rule]) -> Iterator[Finding]:
    """Yield what ``rules`` find in a plain text, each rule once."""
    for rule in rules:
        for sign, marks in rule.marks:
            if sign in text and any(map(text.__contains__, marks)):
                if any(rule.is_real(match.group()) for match in rule.pattern.finditer(text)):
                    yield Finding(rule.name, rule.group)
                break


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


def has_card(found: str) -> bool:
    """Whether digits in groups are the number of a payment card, or hold one as cards are printed, with a date or a
    code before or after it. Rows of a table are neither."""
    groups = re.findall(r"\d+", found)
    if is_card("".join(groups)) or any(map(is_card, groups)):
        return True
    widths = list(map(len, groups))
    for printed in _PRINTED:
        for first in range(len(groups) - len(printed) + 1):
            last = first + len(printed)
            is_alone = (widths[:first] + widths[last:]).count(4) < 2
            if widths[first:last] == printed and is_alone and is_card("".join(groups[first:last])):
                return True
    return False


def is_card(packed: str) -> bool:
    """Whether digits are a payment card's number: of a known kind and length, with the right check digit (Luhn)."""
    if _CARD.fullmatch(packed) is None or len(set(packed)) == 1:
        return False
    digits = [int(digit) for digit in packed]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(found: str) -> bool:
    """Whether an account number is as long as its country has them, with the right check digits (ISO 13616)."""
    packed = re.sub(r"[ -]", "", found).upper()
    length = _IBAN_LENGTHS.get(packed[:2], 0)  # what follows may have been taken for a part of it
    if not length <= len(packed) or not length:
        return False
    return int("".join(str(int(sign, 36)) for sign in packed[4:length] + packed[:4])) % 97 == 1


def is_us_ssn(found: str) -> bool:
    """Whether a number can be a social security number: some areas, groups and serials never were."""
    area, group, serial = found.split(found[3])
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def is_phone(found: str) -> bool:
    """Whether digits in groups are a telephone number rather than a date, an address or a sum."""
    groups = re.findall(r"\d+", found)
    if not 8 <= sum(map(len, groups)) <= 15 or _DATE.match(found) is not None:
        return False
    return found[0] in "+(0" or list(map(len, groups)) == [3, 3, 4]


def is_ip(found: str) -> bool:
    """Whether four numbers are an address that names one machine."""
    parts = [int(part) for part in found.split(".")]
    return all(part < 256 for part in parts) and parts[0] not in (0, 127, 255)


def is_assigned(found: str) -> bool:
    """Whether what is assigned is too random for a placeholder."""
    return is_random(re.split(r"=>|:=|[:=]", found, maxsplit=1)[1].strip(" \t\"'\\"))


def is_bearer(found: str) -> bool:
    """Whether what is borne is too random for a placeholder."""
    return is_random(found.split()[1])


def is_random(value: str) -> bool:
    """Whether a value has 16 signs, letters and digits among them, and 3.5 bits a sign."""
    if len(value) < 16 or not any(map(str.isdigit, value)) or not any(map(str.isalpha, value)):
        return False
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values()) > 3.5


def is_login(found: str) -> bool:
    """Whether it is a name and a password as HTTP's basic authentication sends them."""
    packed = found.split()[1].rstrip("=")
    if len(packed) % 4 == 1:
        return False
    said = base64.b64decode(packed + "=" * (-len(packed) % 4))
    return b":" in said[1:-1] and all(32 <= code < 127 for code in said)


_PRINTED = ([4, 4, 4, 4], [4, 6, 5], [4, 6, 4])  # the groups of digits on cards

# Visa, Mastercard, American Express, Discover, JCB, Diners Club, UnionPay, Maestro.
_CARD = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|3(?:0|6|8|9)\d{12}|3\d{15}|(?:1800|2131)\d{11}"
    r"|6(?:0|2|4|5)\d{14,17}|(?:50|5[6-8]|6[37])\d{10,17}"
)
_LENGTHS = (
    "AD24AE23AL28AT20AZ28BA20BE16BG22BH22BR29BY28CH21CR22CY28CZ24DE22DK18DO28EE20EG29ES24FI18FO18FR27GB22GE22GI23GL18"
    "GR27GT28HR21HU28IE22IL23IQ23IS26IT27JO30KW30KZ20LB28LC32LI21LT20LU20LV21LY25MC27MD24ME22MK19MR27MT31MU30NL18NO15"
    "PK24PL28PS29PT25QA29RO24RS22SA24SC31SE24SI19SK24SM27ST25SV28TL23TN24TR26UA29VA22VG24XK20"
)
_IBAN_LENGTHS = {country: int(length) for country, length in re.findall(r"([A-Z]{2})(\d\d)", _LENGTHS)}
_DATE = re.compile(r"(?:19|20)\d\d[-./ ]|\d{1,2}[-./ ]\d{1,2}[-./ ](?:19|20)\d\d")


_USUAL = "zjqxkvbKSACyTPwgfmpcu.-dlhrsinaote "  # signs that texts often have, the rarer ones first


def _marks(*marks: str) -> Marks:
    """Group marks by their rarest sign: to look for one sign takes a tenth of the time of a mark."""
    by_sign: dict[str, list[str]] = {}
    for mark in marks:
        by_sign.setdefault(min(mark, key=_USUAL.find), []).append(mark)
    return tuple((sign, tuple(its)) for sign, its in by_sign.items())


def _secret(name: str, marks: str, pattern: str, is_real: Callable[[str], bool] = lambda found: True) -> Rule:
    return Rule(name, "secrets", _marks(*marks.split()), re.compile(pattern), is_real)


_DIGITS = _marks(*"0123456789")
# A row of digits, spaces and hyphens, or four groups with another sign between.
_CARD_LIKE = (
    r"(?<![\d.])\d(?:[ -]{0,2}\d){11,31}(?!\d)|(?<!\d)(?<!\d[._/,\n])\d{4}([._/,\n])\d{4}\1\d{4}\1\d{4}(?!\1?\d)"
)
# A token begins here: not inside a word, though an escaped line break or tab before it ends in a letter.
_B = r"(?<![A-Za-z0-9](?<!\\[nrtbfv]))"
RULES = (
    _secret("aws_key", "AKIA ASIA", r"(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Z0-9])"),
    _secret("github_token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50}"),
    _secret("gitlab_token", "glpat- gldt- glrt-", r"gl(?:pat|dt|rt)-[\w-]{20}"),
    _secret("slack_token", "xox xapp-", r"xox[abeoprs]-[A-Za-z0-9-]{10}|xapp-\d-[A-Za-z0-9-]{10}"),
    _secret("slack_webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w{6}"),
    _secret("stripe_key", "k_live_ k_test_", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16}"),
    _secret("anthropic_key", "sk-ant-", r"sk-ant-[\w-]{20}"),
    _secret("openai_key", "sk-", _B + r"sk-(?:(?:proj|svcacct|admin|None)-[\w-]{20}|[A-Za-z0-9]{32})"),
    _secret("google_key", "AIza", _B + r"AIza[\w-]{35}"),
    _secret("google_token", "ya29. GOCSPX-", r"ya29\.[\w-]{20}|GOCSPX-[\w-]{20}"),
    _secret("huggingface_token", "hf_", _B + r"hf_[A-Za-z]{30}"),
    _secret("npm_token", "npm_", _B + r"npm_[A-Za-z0-9]{36}"),
    _secret("pypi_token", "pypi-", r"pypi-[\w-]{50}"),
    _secret("sendgrid_key", "SG.", _B + r"SG\.[\w-]{16,32}\.[\w-]{16}"),
    _secret("twilio_key", "SK AC", _B + r"(?:SK|AC)[0-9a-f]{32}(?![0-9a-f])"),
    _secret("telegram_token", ":AA", r"(?<!\d)\d{8,10}:AA[\w-]{33}"),
    _secret("digitalocean_token", "doo_v1_ dop_v1_ dor_v1_", r"do[opr]_v1_[0-9a-f]{32}"),
    _secret("shopify_token", "shpat_ shpca_ shppa_ shpss_", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    _secret("databricks_token", "dapi", _B + r"dapi[0-9a-f]{32}"),
    _secret("azure_key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/=]{40}"),
    _secret("jwt", "eyJ", _B + r"eyJ[\w-]{8,300}\.eyJ[\w-]{8}"),
    _secret("private_key", "PRIVATE KEY", r"-----BEGIN (?:[A-Z]{2,9} ){0,2}PRIVATE KEY(?: BLOCK)?-----"),
    _secret("tollgate_key", "tg- tgadmin- whsec_", _B + r"(?:tg|tgadmin)-[\w-]{43}|whsec_[A-Za-z0-9+/=]{24}"),
    _secret(
        "model_service_key",
        "gsk_ xai- pplx- nvapi- sk-or-v1- r8_ tgp_v1_",
        _B + r"(?:gsk_[A-Za-z0-9]{40}|xai-[A-Za-z0-9]{60}|pplx-[A-Za-z0-9]{40}|nvapi-[\w-]{60}|sk-or-v1-[0-9a-f]{40}"
        r"|r8_[A-Za-z0-9]{30}|tgp_v1_[\w-]{40})",
    ),
    _secret(
        "service_token",
        "dckr_pat_ glsa_ hvs. lin_api_ ntn_ sbp_ figd_ PMAK- NRAK- dp.pt. pscale_ ATATT3 AGE-SECRET-KEY-1",
        _B + r"(?:dckr_pat_[\w-]{20}|glsa_\w{32}|hvs\.[\w-]{24}|lin_api_[A-Za-z0-9]{32}|ntn_[A-Za-z0-9]{32}"
        r"|sbp_[0-9a-f]{40}|figd_[\w-]{32}|PMAK-[0-9a-f]{24}|NRAK-[A-Z0-9]{20}|dp\.pt\.\w{32}|pscale_(?:tkn|oauth|pw)_[\w-]{24}"
        r"|ATATT3[\w-]{40}|AGE-SECRET-KEY-1[A-Z0-9]{40})",
    ),
    _secret("bearer_token", "earer", r"[Bb]earer[ \t]{1,3}[\w.~+/-]{20,200}", is_bearer),
    _secret("basic_login", "asic ", r"[Bb]asic [A-Za-z0-9+/]{8,200}={0,2}(?![\w+/])", is_login),
    _secret("url_password", "://", r"://[^\s:/@]{0,64}:[^\s:/@]{3,128}@[\w.-]"),
    _secret(
        "assigned_secret",
        "= : =>",
        r"(?i:passw(?:or)?d|secret|token|api[_-]?key|access[_-]?key)\w{0,20}[\\\"']{0,3}[ \t]{0,3}(?:=>|:=|[:=])"
        r"[ \t]{0,3}[\\\"']{0,3}[\w+/=.~!@#$%^&*-]{16,200}+(?![(\[])",  # a call is code
        is_assigned,
    ),
    Rule("card", "personal_data", _DIGITS, re.compile(_CARD_LIKE), has_card),
    Rule(
        "iban",
        "personal_data",
        _DIGITS,
        re.compile(_B + r"[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]{4}){2,7}[ -]?[A-Za-z0-9]{0,4}"),
        is_iban,
    ),
    Rule("us_ssn", "personal_data", _DIGITS, re.compile(r"(?<![\d-])\d{3}([-. ])\d{2}\1\d{4}(?![\d-])"), is_us_ssn),
    Rule(
        "email",
        "contacts",
        _marks("@"),
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}"),
    ),
    Rule(
        "email",
        "contacts",
        _marks(*(a + at + b for at in ("at", "AT", "@") for a, b in ("()", "[]", "{}", "<>"))),
        re.compile(
            r"[\w.+-]{1,64} ?[\[({<](?:at|AT|@)[\])}>] ?[\w-]{1,63}"
            r"(?: ?(?:\.|[\[({<](?:dot|DOT|\.)[\])}>]) ?[\w-]{1,63}){1,8}"
        ),
    ),
    Rule(
        "phone",
        "contacts",
        _DIGITS,
        re.compile(
            r"(?<![\w.+-](?<!\\[nrtbfv]))"
            r"(?:(?:\+|00)\d{1,3}[ .-]?)?(?:\(\d{1,4}\)[ .-]?)?\d{2,5}(?:[ .-]\d{2,7}){1,4}(?![\w-])"
        ),
        is_phone,
    ),
    Rule("ip_address", "contacts", _DIGITS, re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), is_ip),
)
