# Everyday text of work that must pass: mails and notes with addresses and links, code, logs, tables and data. Prompts
# of data sets have little of it; a classifier that never saw any takes an address or a traceback for an attack. Each
# is made of parts by fixed dice; pieces of code are of the standard library's packages (PSF licence).

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.moderation_training.texts.work_code import SNIPPETS

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

NAMES = """Maria|Tom|Priya|Wei|Lucas|Fatima|Erik|Sofia|Kenji|Olga|Ben|Chloe|Ahmed|Julia|Marco|Nina|Pedro|Ruth|Sam|Yuki
Peter|Laura|David|Emma|Oscar|Ines|Paul|Mei|Carlos|Hanna"""
SURNAMES = "berg|garcia|kim|novak|rossi|smith|tanaka|weber|jones|silva|patel|martin|larsen|brown|lopez|meyer"
DOMAINS = """example.com|example.org|example.net|acme.io|mail.test|northwind.com|city-library.org|gmail.com|outlook.com
university.edu|support.acme.io|bakery.fr|clinic.co.uk|startup.dev|firma.de|proton.me"""
PATHS = "|docs|docs/start|help/faq|blog/2026/11|orders/4711|issues/218|wiki/Lima|search?q=tea|a/b.html|v2/api#list"
THINGS = """report|invoice|slides|contract|draft|photos|minutes|offer|schedule|survey|budget|timetable|menu|application
receipt|floor plan|price list|guest list|release notes|translation"""
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|noon|tomorrow|next week|the end of the month|9 am|3 pm"

NOTES = """Email $mail.|Send the $thing to $mail.|Please forward this to $mail.|Mail the $thing to $mail by $day.
Write an email to $mail.|Write a message to $mail about the $thing.|Write to $name at $mail by $day.|Write to us: $mail
Call $name at $phone.|Call me on $phone.|Please call $phone and ask for $name.|Text $name: $phone
Ring $phone before $day.
Contact $mail for the $thing.|My address is $mail.|You can reach $name at $mail or $phone.|Reply to $mail, please.
Send $name the $thing.|Send it to $mail and copy $mail2.|Ask $name to send the $thing by $day.|Invite $mail and $mail2.
See $link.|Read $link and summarize it.|Summarize this page: $link|What does $link say about the $thing?|Open $link.
The $thing is at $link.|Visit $link for the $thing.|Download the $thing from $link.|Follow the steps on $link.
Click on $link to see the $thing.|Here is the link: $link|Is $mail a valid address?|Is $link down?
Fetch $link with curl.
Draft a polite reply to $name <$mail>.|Add $mail to the list.|Remove $mail from the newsletter.|Which domain is $mail?
Write $name a note: the $thing comes on $day.|Tell $name that the $thing is ready.|Remind $name to call $phone.
Subscribe me with $mail.|Extract the addresses: $mail, $mail2.|Who wrote from $mail?|Bring the $thing to $name on $day.
Print the $thing for $name.|Show me the $thing of $name.|Tell me when $name writes.|Repeat the $thing for $name.
Write a text to $name that the $thing is late.|Ignore the last mail, the right address is $mail.
Forget the $thing, send the old one to $mail.|From now on write to $mail, not to $mail2.
You can drop the $thing at $link."""
OPENINGS = "Hi $name,|Hello $name,|Dear $name,|Dear all,|Good morning $name,|Hey $name|Dear Ms. $last,|Dear Mr. $last,"
SAID = """Thanks for the $thing.|I attach the $thing.|Could you look at it by $day?|The link is $link.
Please write to $mail if anything is missing.|Call me at $phone when you have a minute.|We meet on $day.
I have not received the $thing yet.|$name will be on leave until $day.|The form is on $link.|See you on $day.
Please confirm the $thing.|I moved the meeting to $day.|Our new address is $mail.|The numbers look good.
Please send the $thing to $name ($mail).|The room is booked until $day.|Let me know what you think.
We changed the password policy, please log in at $link.|The server will be restarted on $day.
I copied $name <$mail2> so that nothing is lost.|Sorry for the late answer.|Everything went well."""
CLOSINGS = "Best,|Best regards,|Kind regards,|Thanks,|Yours sincerely,|Cheers,|Many thanks,"
BEFORE = """|What is wrong here?|Explain this.|Why does it fail?|Summarize this.|Translate this into German.
Review this:
Make it shorter.|Find the mistake.|Can you clean this up?|What does this do?|Turn it into a table.
Write tests for it."""

VERBS = "GET|POST|PUT|DELETE|HEAD"
UNITS = "api|worker|scheduler|db|cache|nginx|sshd|systemd|kernel|cron|mailer|billing|auth|frontend"
EVENTS = """connection closed by peer|job finished|user logged in|retrying in 5 s|cache miss|timeout after 30000 ms
started|stopped|disk usage at 81 %|health check passed|token refreshed|configuration reloaded|connection refused
permission denied|request rejected: invalid token|queue is empty|backup written|failed to send mail to $mail
accepted password for $name from 10.0.0.7 port 52144 ssh2|process killed: out of memory|segment uploaded to $link"""
LEVELS = "INFO|DEBUG|WARNING|ERROR|info|warn|error"
ERRORS = (
    "KeyError: 'name'|ValueError: invalid literal|TimeoutError|ConnectionResetError: [Errno 104]|OSError: [Errno 28]"
)
FIELDS = "id|name|email|city|price|amount|date|status|score|country|age|total|url|created_at|quantity|phone"


def work_texts() -> Iterator[tuple[str, str]]:
    """Yield each text with its kind: "mail", "code", "log" or "data": the same wherever Python is the same."""
    dice = random.Random(SEED)
    for note in _parts(NOTES):
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
    said = " ".join(dice.sample(_parts(SAID), dice.randint(2, 6)))
    mail = "\n\n".join((dice.choice(_parts(OPENINGS)), said, f"{dice.choice(_parts(CLOSINGS))}\n$name"))
    head = "From: $mail\nTo: $mail2\nSubject: $thing\n\n" if dice.random() < 0.4 else ""
    return _filled(head + mail, dice)


def _snippet(dice: random.Random) -> str:
    return _filled("\n\n".join(dice.sample(SNIPPETS, dice.randint(1, 3))), dice)


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
        lines = ["Traceback (most recent call last):", *lines, dice.choice(_parts(ERRORS))]
    return "\n".join(lines)


def _data(dice: random.Random) -> str:
    fields = dice.sample(_parts(FIELDS), dice.randint(2, 7))
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
    ask = dice.choice(_parts(BEFORE)) if dice.random() < 0.5 else ""
    return f"{ask}\n\n{text}" if ask else text


def _filled(text: str, dice: random.Random) -> str:
    """Put something else into every slot: $mail, $link, $name, ..."""
    for slot, make in _SLOTS.items():
        while slot in text:
            text = text.replace(slot, make(dice), 1)
    return text


def _address(dice: random.Random) -> str:
    name, last = dice.choice(_parts(NAMES)).lower(), dice.choice(_parts(SURNAMES))
    said = dice.choice((name, f"{name}.{last}", f"{name[0]}{last}", f"{name}{dice.randint(1, 99)}", "info", "orders"))
    return f"{said}@{dice.choice(_parts(DOMAINS))}"


def _one(parts: str) -> Callable[[random.Random], str]:
    return lambda dice: dice.choice(_parts(parts))


# In this order: what stands for others comes first.
_SLOTS: dict[str, Callable[[random.Random], str]] = {
    "$event": _one(EVENTS),
    "$mail2": _address,
    "$mail": _address,
    "$link": lambda dice: (
        f"{dice.choice(('https://', 'https://www.', 'http://', ''))}{dice.choice(_parts(DOMAINS))}"
        f"/{dice.choice(_parts(PATHS))}"
    ),
    "$phone": lambda dice: dice.choice(
        ("+49 30 {:07d}", "555-{:04d}", "(212) 555-{:04d}", "+1 415 {:07d}", "0{:09d}")
    ).format(dice.randint(100, 9999)),
    "$name": _one(NAMES),
    "$last": _one(SURNAMES),
    "$thing": _one(THINGS),
    "$day": _one(DAYS),
    "$verb": _one(VERBS),
    "$unit": _one(UNITS),
    "$level": _one(LEVELS),
    "${m}": lambda dice: f"{dice.randint(0, 59):02d}",
    "${n}": lambda dice: str(dice.randint(1, 250)),
    "$k": lambda dice: str(dice.randint(100, 9999)),
    "$m": lambda dice: f"{dice.randint(0, 59):02d}",
    "$n": lambda dice: str(dice.randint(1, 250)),
}


def _parts(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")
