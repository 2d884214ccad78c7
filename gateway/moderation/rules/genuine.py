# Whether what a rule's pattern finds is what it looks like: check digits, lengths, numbers that were never issued, and
# how random a value is.

from __future__ import annotations

import base64
import math
import re
from collections import Counter


def is_any(found: str) -> bool:
    """Whatever a pattern finds whose form alone tells what it is."""
    return True


def has_card(found: str) -> bool:
    """Whether digits in groups are the number of a payment card, or hold one as cards are printed, with a date or a
    code before or after it. Rows of a table are neither."""
    groups = re.findall(r"\d+", found)
    widths = list(map(len, groups))
    if is_card("".join(groups)) or (max(widths) > 11 and any(map(is_card, groups))):
        return True
    for printed in _PRINTED:
        for first in range(len(groups) - len(printed) + 1):
            last = first + len(printed)
            is_alike = widths[first:last] == printed and is_card("".join(groups[first:last]))
            if is_alike and (widths[:first] + widths[last:]).count(4) < 2:
                return True
    return False


def is_said_card(found: str) -> bool:
    """Whether the digits after the word are a card's number, which then may be of a length that is mostly no card's."""
    return is_card(re.sub(r"\D", "", found), _SAID_CARD)


def is_card(packed: str, kinds: re.Pattern[str] | None = None) -> bool:
    """Whether digits are a payment card's number: of a known kind and length, with the right check digit (Luhn)."""
    if (kinds or _CARD).fullmatch(packed) is None or len(set(packed)) == 1:
        return False
    digits = [int(digit) for digit in packed]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(found: str) -> bool:
    """Whether an account number is as long as its country has them, with the right check digits (ISO 13616). What
    follows may have been taken for a part of it, but no sign right behind it: that is a hash's."""
    length = _IBAN_LENGTHS.get(found[:2].upper(), 0)
    places = [place for place, sign in enumerate(found) if sign not in " -"]
    if not 0 < length <= len(places) or (length < len(places) and places[length] == places[length - 1] + 1):
        return False
    packed = "".join(found[place] for place in places[:length]).upper()
    if packed[:2] in _IBANS_OF_DIGITS and not packed[2:].isdigit():
        return False
    return int("".join(str(int(sign, 36)) for sign in packed[4:] + packed[:4])) % 97 == 1


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
    value = re.split(r"=>|:=|[:=]", found, maxsplit=1)[1].strip(" \t\"'\\")
    return is_random(re.split(r"&\w+=", value)[0])  # of an address, that part


def is_bearer(found: str) -> bool:
    """Whether what is borne is too random for a placeholder."""
    return is_random(found.split()[1])


def is_random(value: str) -> bool:
    """Whether a value has 16 signs, letters and digits among them, and 3.5 bits a sign; 3 where all are hexadecimal."""
    if len(value) < 16 or not any(map(str.isdigit, value)) or not any(map(str.isalpha, value)):
        return False
    counts = Counter(value)
    least = 3.5 if value.strip("0123456789abcdefABCDEF-") else 3.0
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values()) > least


def is_login(found: str) -> bool:
    """Whether it is a name and a password as HTTP's basic authentication sends them."""
    packed = re.split(r"[ \"'\\]+", found.rstrip("\"'"))[-1].rstrip("=")
    if len(packed) % 4 == 1:
        return False
    said = base64.b64decode(packed + "=" * (-len(packed) % 4))
    return b":" in said[1:-1] and all(32 <= code < 127 for code in said)


_PRINTED = ([4, 4, 4, 4], [4, 6, 5], [4, 6, 4])  # the groups of digits on cards

# Visa, Mastercard, American Express, Discover, JCB, Diners Club, UnionPay, Maestro; but not of the lengths that ids of
# programs have, nineteen digits most of all, unless the text says that it is a card.
_CARD = re.compile(
    r"4\d{12}(?:\d{3})?|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|3(?:0|6|8|9)\d{12}|3\d{15}|(?:1800|2131)\d{11}"
    r"|6(?:0|2|4|5)\d{14}|(?:50|5[6-8]|6[37])\d{14}"
)
_SAID_CARD = re.compile(r"4\d{18}|6(?:0|2|4|5)\d{14,17}|(?:50|5[6-8]|6[37])\d{10,17}")
_LENGTHS = (
    "AD24AE23AL28AT20AZ28BA20BE16BG22BH22BR29BY28CH21CR22CY28CZ24DE22DK18DO28EE20EG29ES24FI18FO18FR27GB22GE22GI23GL18"
    "GR27GT28HR21HU28IE22IL23IQ23IS26IT27JO30KW30KZ20LB28LC32LI21LT20LU20LV21LY25MC27MD24ME22MK19MR27MT31MU30NL18NO15"
    "PK24PL28PS29PT25QA29RO24RS22SA24SC31SE24SI19SK24SM27ST25SV28TL23TN24TR26UA29VA22VG24XK20"
)
_IBANS_OF_DIGITS = re.findall("..", "AEATBABECZDEDKEEESFIFOGLHRHUILISLTMENOPLPTRSSESISKTNXK")
_IBAN_LENGTHS = {country: int(length) for country, length in re.findall(r"([A-Z]{2})(\d\d)", _LENGTHS)}
_DATE = re.compile(r"(?:19|20)\d\d[-./ ]|\d{1,2}[-./ ]\d{1,2}[-./ ](?:19|20)\d\d")
