# Everyday text of work that must pass: mails and notes with addresses and links, code, logs, tables and data. Prompts
# of data sets have little of it; a classifier that never saw any takes an address or a traceback for an attack. Each
# is made of parts by fixed dice; pieces of code are of the standard library's packages (PSF licence).

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("work")

SEED = 20264
EACH = 240  # texts of a kind
PIECE = 2000  # characters of code
PACKAGES = (
    *(
        "asyncio",
        "collections",
        "concurrent.futures",
        "ctypes",
        "email",
        "html",
        "http",
        "importlib",
        "json",
        "logging",
    ),
    *("multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref", "xml.dom", "xml.etree", "xml.sax", "xmlrpc"),
)


def work_texts() -> Iterator[tuple[str, str]]:
    """Yield each text with its kind: "mail", "code", "log" or "data": the same wherever Python is the same."""
    dice = random.Random(SEED)
    for note in PARTS["notes"]:
        for _ in range(6):
            yield _filled(note, dice), "mail"
    kinds: dict[str, Callable[[random.Random], str]] = {"mail": _mail, "code": _snippet, "log": _log, "data": _data}
    for kind, make in kinds.items():
        for _ in range(EACH):
            yield _asked(make(dice), dice), kind
    pieces = list(_pieces())
    for piece in dice.sample(pieces, min(EACH, len(pieces))):
        yield _asked(piece, dice), "code"


def _mail(dice: random.Random) -> str:
    said = " ".join(dice.sample(PARTS["said"], dice.randint(2, 6)))
    mail = "\n\n".join((dice.choice(PARTS["openings"]), said, f"{dice.choice(PARTS['closings'])}\n$name"))
    head = "From: $mail\nTo: $mail2\nSubject: $thing\n\n" if dice.random() < 0.4 else ""
    return _filled(head + mail, dice)


def _snippet(dice: random.Random) -> str:
    return _filled("\n\n".join(dice.sample(PARTS["snippets"], dice.randint(1, 3))), dice)


def _log(dice: random.Random) -> str:
    forms = (
        '10.0.$n.$n - - [21/Nov/2026:12:$m:$m +0000] "$verb /$thing/$k HTTP/1.1" 200 $k "-" "curl/8.5.0"',
        "Nov 21 12:$m:$m host$n $unit[$k]: $event",
        "2026-11-21 12:$m:$m,$k $level $unit.core: $event (request $k)",
        'time=2026-11-21T12:$m:${m}Z level=$level msg="$event" unit=$unit took=${n}ms',
        "[$k.$k] $unit: $event",
        '  File "/srv/$unit/$thing.py", line $k, in $unit\n    $unit($k)',
    )
    chosen = dice.sample(forms, 1 if dice.random() < 0.7 else 2)
    lines = [_filled(dice.choice(chosen), dice) for _ in range(dice.choice((1, 3, 10, 25)))]
    if "File" in lines[0]:
        lines = ["Traceback (most recent call last):", *lines, dice.choice(PARTS["errors"])]
    return "\n".join(lines)


def _data(dice: random.Random) -> str:
    fields = dice.sample(PARTS["fields"], dice.randint(2, 7))
    rows = [{field: _value(field, dice) for field in fields} for _ in range(dice.choice((1, 4, 12, 25)))]
    form = dice.randrange(5)
    if form < 2:
        return json.dumps(rows if len(rows) > 1 else rows[0], indent=2 if form else None)
    if form == 2:
        return "\n".join(
            ("- " if at == 0 else "  ") + f"{key}: {row[key]}" for row in rows for at, key in enumerate(row)
        )
    sign = dice.choice((",", ";", "\t")) if form == 3 else " | "
    return "\n".join(sign.join(map(str, row)) for row in (fields, *(row.values() for row in rows)))


def _value(field: str, dice: random.Random) -> str | int | float:
    if field in ("id", "age", "quantity", "score"):
        return dice.randint(1, 999)
    if field in ("price", "amount", "total"):
        return round(dice.random() * 500, 2)
    if field in ("date", "created_at"):
        return f"2026-{dice.randint(1, 12):02d}-{dice.randint(1, 28):02d}"
    forms = {"email": "$mail", "url": "$link", "phone": "$phone", "name": "$name", "status": "open"}
    return _filled(forms.get(field, "$last"), dice)


def _pieces() -> Iterator[str]:
    """Yield the modules of the packages, cut."""
    for name in PACKAGES:
        for folder in importlib.import_module(name).__path__:
            for path in sorted(Path(folder).glob("*.py")):
                text = path.read_text(encoding="utf-8")
                yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _asked(text: str, dice: random.Random) -> str:
    ask = dice.choice(PARTS["before"]) if dice.random() < 0.5 else ""
    return f"{ask}\n\n{text}" if ask else text


def _filled(text: str, dice: random.Random) -> str:
    """Put something else into every slot: $mail, $link, $name, ..."""
    for slot, make in _SLOTS.items():
        while slot in text:
            text = text.replace(slot, make(dice), 1)
    return text


def _address(dice: random.Random) -> str:
    name, last = dice.choice(PARTS["names"]).lower(), dice.choice(PARTS["surnames"])
    said = dice.choice((name, f"{name}.{last}", f"{name[0]}{last}", f"{name}{dice.randint(1, 99)}", "info", "orders"))
    return f"{said}@{dice.choice(PARTS['domains'])}"


def _one(parts: list[str]) -> Callable[[random.Random], str]:
    return lambda dice: dice.choice(parts)


# In this order: what stands for others comes first.
_SLOTS: dict[str, Callable[[random.Random], str]] = {
    "$event": _one(PARTS["events"]),
    "$mail2": _address,
    "$mail": _address,
    "$link": lambda dice: (
        f"{dice.choice(('https://', 'https://www.', 'http://', ''))}{dice.choice(PARTS['domains'])}"
        f"/{dice.choice(PARTS['paths'])}"
    ),
    "$phone": lambda dice: dice.choice(
        ("+49 30 {:07d}", "555-{:04d}", "(212) 555-{:04d}", "+1 415 {:07d}", "0{:09d}")
    ).format(dice.randint(100, 9999)),
    "$name": _one(PARTS["names"]),
    "$last": _one(PARTS["surnames"]),
    "$thing": _one(PARTS["things"]),
    "$day": _one(PARTS["days"]),
    "$verb": _one(PARTS["verbs"]),
    "$unit": _one(PARTS["units"]),
    "$level": _one(PARTS["levels"]),
    "${m}": lambda dice: f"{dice.randint(0, 59):02d}",
    "${n}": lambda dice: str(dice.randint(1, 250)),
    "$k": lambda dice: str(dice.randint(100, 9999)),
    "$m": lambda dice: f"{dice.randint(0, 59):02d}",
    "$n": lambda dice: str(dice.randint(1, 250)),
}
