# Rules find what they are for however it is disguised, let everyday text pass, and stay linear.

from __future__ import annotations

import base64
import codecs
import string
import uuid
from hashlib import sha256

import pytest

from gateway.moderation.classifier.hidden import hidden
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules.rules import find_by_rules, foldings, holds_phrase

AWS = "AKIAIOSFODNN7EXAMPLE"
OPENAI = "sk-proj-" + "aB3_" * 10


def found(text: str) -> set[str]:
    shown = plain(text)
    return {finding.name for one in (shown, *hidden(shown)) for finding in find_by_rules(one)}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"my key is {AWS}", "aws_key"),
        ("ghp_" + "a1B2" * 9, "github_token"),
        ("sk-proj-" + "aB3_" * 10, "openai_key"),
        ("sk-ant-api03-" + "aB3_" * 10, "anthropic_key"),
        ("AIza" + "Sy1B2c3" * 5, "google_key"),
        ("hf_" + "aBcDe" * 7, "huggingface_token"),
        ("xoxb-123456789012-abcdef", "slack_token"),
        ("tg-" + "a" * 43, "tollgate_key"),
        ("postgres://user:hunter22@db/x", "url_password"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "private_key"),
        ("redis://:hunter22@cache:6379/0", "url_password"),
        ('API_KEY="f8Ks93jdLs02mNx7QpZt"', "assigned_secret"),
        ("password: q8Zs93jdLs02mNx7QpZt8w==", "assigned_secret"),
        ("'client_secret' => 'f8Ks93jds02mNx7QpZt'", "assigned_secret"),
        ("pay with 4111 1111 1111 1111", "card"),
        ("pay with 3782-822463-10005", "card"),
        ("to DE89 3704 0044 0532 0130 00 please", "iban"),
        ("GB29NWBK60161331926819", "iban"),
        ("my number is 078-05-1120", "us_ssn"),
        ("write to a.b@example.com", "email"),
        ("call +1 (415) 555-2671", "phone"),
        ("at 10.11.12.13", "ip_address"),
        ("pay with 4111 1111 1111 1111 04/27 123", "card"),
        ("pay with 4111111111111111 737", "card"),
        ("pay with 2: 3782 822463 10005 1234", "card"),
        ("pay with 4111.1111.1111.1111", "card"),
        ("DE89-3704-0044-0532-0130-00", "iban"),
        ("my number is 078.05.1120", "us_ssn"),
        ("write to a.b (at) example (dot) com", "email"),
        ("write to a.b[at]example.com", "email"),
        ("gsk_" + "a1B2" * 10, "model_service_key"),
        ("sk-or-v1-" + "a1b2" * 16, "model_service_key"),
        ("hvs." + "a1B2_" * 6, "service_token"),
        ("Authorization: Bearer q8Zs93jdLs02mNx7QpZt8w", "bearer_token"),
        ("Authorization: Basic " + base64.b64encode(b"anna:hunter22").decode(), "basic_login"),
    ],
)
def test_each_rule_finds_its_own(text: str, name: str) -> None:
    """One text for each."""
    assert name in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # the check digit is wrong
        "GB29NWBK60161331926818",
        "DE89 3704",
        "666-05-1120",  # no such area
        "on 2024-01-15 at 10:30 in room 12",
        'password = "changeme-please-now"',
        "token = tokenizer2.encode_the_words(text)[0]",
        "secret: https://example.com/how-to-keep-one-2",
        '{"max_tokens":4096,"temperature":0.7,"stream":true,"token":{"type":"string"}}',
        "The answer is 3.14159265358979 and 1000000000000000.",
        "AKIA is a prefix, ghp_ as well; see https://example.com/path?x=1",
        "Authorization: Bearer YOUR_TOKEN_GOES_HERE, or Basic authentication, or Basic understanding",
        "\n".join(" ".join(str(1000 + 37 * (row * 8 + column) % 9000) for column in range(8)) for row in range(30)),
        "\n".join(str(1990 + year) for year in range(40)),
        " ".join(str(uuid.UUID(int=7**number)) for number in range(30, 45)),
        " ".join(sha256(bytes([number])).hexdigest() for number in range(12)),
        " ".join(f"${number * 1237 / 100:,.2f}" for number in range(60)),
        "00:1a:2b:3c:4d:5e fe80:0000:0000:0000:0202:b3ff:fe1e:8329 2001:0db8:85a3:0000:0000:8a2e:0370:7334",
        "grades: 65, 75, 80, 92, 88, 79, 100, 68, 95, 73, 84; x = [2**31, 2**10]; print(f'a' 'b')",
        "",
    ],
)
def test_what_only_looks_like_it_passes(text: str) -> None:
    """Checksums, lengths and randomness tell."""
    assert found(text) == set()


def cut(text: str, size: int, between: str) -> str:
    return between.join(text[start : start + size] for start in range(0, len(text), size))


DISGUISES = {
    "zero-width": "\u200b".join(AWS),
    "soft hyphens": "\u00ad".join(AWS),
    "cyrillic": AWS.replace("A", "\u0410").replace("I", "\u0406"),
    "fullwidth": "".join(chr(0xFF01 + ord(sign) - 0x21) for sign in AWS),
    "tags": "see" + "".join(chr(0xE0000 + ord(sign)) for sign in f" {AWS}"),
    "accents": "\u0301".join(AWS),
    "base64": base64.b64encode(f"the key is {AWS}".encode()).decode(),
    "url-safe base64 without padding": base64.urlsafe_b64encode(f"\u00fe\u00ff the key is {AWS} ok".encode())
    .decode()
    .rstrip("="),
    "base64 in lines": "\n".join(
        base64.b64encode(f"first come some words, then the key {AWS}".encode()).decode()[at : at + 24]
        for at in range(0, 80, 24)
    ),
    "base64 twice": base64.b64encode(base64.b64encode(f"the key is {AWS}".encode())).decode(),
    "hexadecimal": f"the key is {AWS}".encode().hex(),
    "percent": "".join(f"%{ord(sign):02x}" for sign in AWS),
    "spelt": " ".join(AWS),
    "spelt with hyphens": "-".join(AWS),
    "spelt in lines": "\n".join(AWS),
    "spelt wide": "  ".join(AWS),
    "one percent escape": AWS.replace("F", "%46"),
    "JSON escapes": "".join(f"\\u{ord(sign):04x}" for sign in AWS),
    "string escapes": "".join(f"\\x{ord(sign):02x}" for sign in AWS),
    "HTML entities": "".join(f"&#{ord(sign)};" for sign in AWS),
    "hexadecimal HTML entities": "".join(f"&#x{ord(sign):x};" for sign in AWS),
    "base64 begun in mid-group": "x" + base64.b64encode(f"the key is {AWS}".encode()).decode(),
    "base64 after bytes that are no text": base64.b64encode(b"\xff\xfe\x80\x00" + AWS.encode() + b"\xff" * 60).decode(),
    "base64 of UTF-16": base64.b64encode(AWS.encode("utf-16-le")).decode(),
    "hexadecimal begun in mid-byte": "a" + f"the key is {AWS}".encode().hex() + "b",
    "look-alikes in base64": base64.b64encode(AWS.replace("A", "\u0410").encode()).decode(),
    "glued to a word": f"key{AWS}",
    "an escape before letters of its own kind": "".join(
        f"\\u{ord(sign):04x}" if sign in "AO" else sign for sign in AWS
    ),
    "escapes in a string in a string": "".join(f"\\\\u{ord(sign):04x}" for sign in AWS),
    "escapes in two halves": "".join(f"\\ud835\\u{0xDC00 + ord(sign) - 65:x}" if sign > "9" else sign for sign in AWS),
    "control characters": "\x00".join(AWS),
    "marks that enclose": "\u20e3".join(AWS),
    "notes between the lines": "\ufff9".join(AWS),
    "braille blanks": "\u2800".join(AWS),
    "cherokee": AWS.translate(str.maketrans("AKIEPLM", "\u13aa\u13e6\u13c6\u13ac\u13e2\u13de\u13b7")),
    "lisu": AWS.translate(str.maketrans("AKIODN", "\ua4ee\ua4d7\ua4f2\ua4f3\ua4d3\ua4e0")),
    "white on black": "".join(chr(0x1F170 + ord(sign) - 65) if sign.isalpha() else "\u277c" for sign in AWS),
    "base64 in groups": cut(base64.b64encode(AWS.encode()).decode(), 4, " "),
    "base64 in short lines": cut(base64.b64encode(f"the key is {AWS}".encode()).decode(), 12, "\n"),
    "base64 quoted as mail": cut(base64.b64encode(f"the key is {AWS}".encode()).decode(), 20, "\n> "),
    "base64 in literals": cut(base64.b64encode(f"the key is {AWS}".encode()).decode(), 20, '" +\n    "'),
    "base64 three times": base64.b64encode(base64.b64encode(base64.b64encode(AWS.encode()))).decode(),
    "base32": base64.b32encode(AWS.encode()).decode(),
    "hexadecimal in pairs": AWS.encode().hex(" "),
    "hexadecimal with colons": AWS.encode().hex(":"),
    "hexadecimal in fours": cut(AWS.encode().hex(), 4, " "),
    "C's numbers": ", ".join(f"0x{ord(sign):02x}" for sign in AWS),
    "code points": " ".join(f"U+{ord(sign):04X}" for sign in AWS),
    "numbers": str(list(AWS.encode())),
    "binary": " ".join(f"{ord(sign):08b}" for sign in AWS),
    "binary without spaces": "".join(f"{ord(sign):08b}" for sign in AWS),
    "octal": " ".join(f"{ord(sign):03o}" for sign in AWS),
    "octal escapes": "".join(f"\\{ord(sign):03o}" for sign in AWS),
    "long string escapes": "".join(f"\\U{ord(sign):08x}" for sign in AWS),
    "percent and u": "".join(f"%u{ord(sign):04x}" for sign in AWS),
    "quoted-printable": "".join(f"={ord(sign):02X}" for sign in AWS),
    "HTML entities without end": "".join(f"&#{ord(sign)}" for sign in AWS),
    "HTML entities twice": "".join(f"&amp;#{ord(sign)};" for sign in AWS),
    "rot13": codecs.encode(AWS, "rot13"),
    "backwards": AWS[::-1],
    "spelt with commas": ", ".join(AWS),
    "spelt in a list": str(list(AWS)),
    "spelt in brackets": "".join(f"[{sign}]" for sign in AWS),
    "spelt with arrows": "->".join(AWS),
    "spelt in tags": "<b>" + "</b><b>".join(AWS) + "</b>",
    "in fours": cut(AWS, 4, " "),
    "in fours with hyphens": cut(AWS, 4, "-"),
    "in pairs": cut(AWS, 2, " "),
    "bold in the middle": f"{AWS[:7]}**{AWS[7:]}**",
    "a tag in the middle": f"{AWS[:7]}</span><span>{AWS[7:]}",
    "two literals": f'"{AWS[:7]}" + "{AWS[7:]}"',
    "two lines of a script": f"{AWS[:7]}\\\n{AWS[7:]}",
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguise_hides_nothing(disguise: str) -> None:
    """The same key, as hostile writers write it."""
    assert "aws_key" in found(f"Please keep this: {DISGUISES[disguise]} and go on.")


@pytest.mark.parametrize("hyphen", "\u2010\u2011\u2013\u2212")
def test_a_hyphen_of_another_kind_is_one(hyphen: str) -> None:
    """In keys as in numbers."""
    assert "openai_key" in found(("sk-proj-" + "aB3_" * 10).replace("-", hyphen))
    assert "card" in found("4111-1111-1111-1111".replace("-", hyphen))


def test_digits_of_other_alphabets_are_digits() -> None:
    """Thai, keycaps, white on black."""
    for zero in (0xE50, 0x1090, 0x1D7CE):
        assert "card" in found("".join(chr(zero + int(digit)) for digit in "4111111111111111"))
    assert "card" in found("".join(f"{digit}\ufe0f\u20e3" for digit in "4111111111111111"))
    assert "card" in found("4111111111111111".replace("1", "\u2776").replace("4", "\u2779"))


@pytest.mark.parametrize("before", ["\\n", "\\t", "\\\\r", '\\"', "\n", "key=", ""])
def test_a_token_begins_after_an_escape_and_not_inside_a_word(before: str) -> None:
    """As it stands in JSON that somebody pasted, or in a call's arguments."""
    assert found(f'{{"note":"Use{before or " "}{OPENAI}"}}') == {"openai_key"}
    assert found(f"a desk{OPENAI}") == set()
    assert "phone" in found(f"call{before or ' '}+1 415 555 2671")
    assert found('{"cmd":"export API_KEY=\\"f8Ks93jdLs02mNx7QpZt\\""}') == {"assigned_secret"}


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        ("Project Nightingale", "What is Project\n  NIGHTINGALE about?"),
        ("Project Nightingale", "What is Pr\u043ej\u0435ct Nightingale about?"),
        ("Projekt M\u00fcller", "Was macht PROJEKT M\u00dcLLER?"),
        ("Projekt M\u00fcller", "Was macht Projekt Mu\u0308ller?"),
        (
            "\u043f\u0440\u043e\u0435\u043a\u0442 \u0432\u0435\u0433\u0430",
            "\u041f\u0420\u041e\u0415\u041a\u0422 \u0412\u0415\u0413\u0410",
        ),
        ("\u8ba1\u5212 \u5929", "\u5173\u4e8e \u8ba1\u5212  \u5929 \u7684"),
    ],
)
def test_a_forbidden_phrase_is_found_in_any_alphabet_case_and_spacing(phrase: str, text: str) -> None:
    """The house's own words."""
    assert holds_phrase(text, foldings(phrase))
    assert not holds_phrase("What is a nightingale? Wer ist M\u00fcller?", foldings(phrase))


ATTACKS = [
    *(
        "a",
        "1",
        "1-",
        "1 ",
        "a.",
        "a@",
        "@a.",
        "sk-",
        "eyJ",
        "://a:",
        "password= ",
        "QUJD",
        "GB29 ",
        "%41",
        "(1",
        "+1 ",
    ),
    *("a b ", "-----BEGIN PRIVATE KEY", "token", "0000 ", "a-", string.ascii_letters),
    *("eyJ-", "eyJ_.eyJ", "\\u00", "&#4", "a\n", "token=", "token=a1", "password => ", "A1b2/", "4f", "%4", "://:a"),
]


@pytest.mark.parametrize("piece", ATTACKS)
def test_no_text_makes_the_rules_slow(piece: str) -> None:
    """Steps grow with the length, not with its square: 64,000 characters end well within the test's time limit, where
    a quadratic pattern takes minutes."""
    found((piece * 64_000)[:64_000])
