# Texts that are strange and harmless: base64, hexdumps, hashes, formulas, patterns, headers, assembly, chess, squeezed
# code; sentences, names and lists in some forty languages, of Faker's words (MIT); and what Postgres says in fifteen
# (PostgreSQL licence). What knows prose and Python alone takes each of them for noise. Made of forms by fixed dice, one
# form a text.

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable, Iterator, Sequence
from gettext import GNUTranslations
from pathlib import Path

from faker import Faker

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("strange_forms")

LOCALES = (
    "ar_AA bg_BG bn_BD cs_CZ da_DK de_DE el_GR en_US es_ES et_EE fa_IR fi_FI fil_PH fr_FR he_IL hi_IN hr_HR hu_HU "
    "hy_AM id_ID it_IT ja_JP ka_GE ko_KR lt_LT lv_LV ne_NP nl_NL no_NO pl_PL pt_BR pt_PT ro_RO ru_RU sk_SK sl_SI sv_SE "
    "ta_IN th_TH tr_TR uk_UA vi_VN zh_CN zh_TW"
)
POSTGRES = ("postgres-", "libpq", "psql", "pg_", "initdb", "plpgsql")  # begin the names of its catalogues
_SLOT = re.compile(r"\$(\$|[a-z]{2,}|[a-zA-Z])")


class StrangeForms:
    """Makes such texts. ``code``: pieces of code to squeeze."""

    def __init__(self, code: Sequence[str], seed: int) -> None:
        self._code = code
        self._dice = dice = random.Random(seed)
        self._tongues = [Faker(locale) for locale in LOCALES.split()]
        for tongue in self._tongues:
            tongue.seed_instance(seed)
        self._tongue = english = next(each for each in self._tongues if each.locales == ["en_US"])
        self._slots: dict[str, Callable[[], object]] = {
            "$": lambda: "$",
            "w": english.word,
            "T": lambda: english.word().title(),
            "U": lambda: english.word().upper(),
            "d": lambda: dice.randint(1, 60),
            "n": lambda: dice.randint(1, 9999),
            "x": lambda: f"{dice.randrange(256):02x}",
            "h": lambda: f"{dice.randrange(1 << 24):x}",
            "v": lambda: dice.choice("abcxyznkij"),
            "ip": lambda: english.ipv4(),
            "hash": lambda: dice.randbytes(32).hex(),
            "sentence": lambda: self._tongue.sentence(nb_words=dice.randint(3, 16)),
            "name": lambda: self._tongue.name(),
            "address": lambda: self._tongue.address().replace("\n", ", "),
            "email": lambda: self._tongue.email(),
            "company": lambda: self._tongue.company(),
            "job": lambda: self._tongue.sentence(nb_words=2),
            "phone": lambda: f"{self._tongue.random_number(9)}",
        }

    def texts(self, forms: int, in_tongues: int) -> Iterator[str]:
        """Yield so many texts of strange forms, and so many in many languages; half of them are asked about."""
        dice = self._dice
        for place in range(forms + in_tongues):
            if place >= forms:
                self._tongue = dice.choice(self._tongues)
                made = self._lines("in_a_tongue")
            else:
                made = self._lines("line") if dice.random() < 0.8 else self._of_bytes()
            yield made if dice.random() < 0.5 else dice.choice(PARTS["before"]) + made

    def _lines(self, kind: str) -> str:
        form = self._dice.choice(PARTS[kind])
        lines = [_SLOT.sub(self._filled, form) for _ in range(self._dice.choice((1, 2, 4, 8, 16, 30)))]
        return self._dice.choice(("\n", "\n", "\n", " ")).join(lines)

    def _filled(self, slot: re.Match[str]) -> str:
        name = slot[1]
        return str(self._slots[name]()) if name in self._slots else self._dice.choice(PARTS[name])

    def _of_bytes(self) -> str:
        dice = self._dice
        data = dice.randbytes(dice.randint(30, 900))
        coded = base64.b64encode(data).decode()
        match dice.randrange(5):
            case 0:
                return coded
            case 1:
                return "\n".join(coded[start : start + 76] for start in range(0, len(coded), 76))
            case 2:
                return data[:300].hex(" ")
            case 3:
                rows = [data[start : start + 16] for start in range(0, len(data), 16)]
                shown = ["".join(chr(code) if 32 <= code < 127 else "." for code in row) for row in rows]
                return "\n".join(f"{16 * at:08x}  {row.hex(' ')}  |{shown[at]}|" for at, row in enumerate(rows))
            case _:
                piece = dice.choice(self._code)
                start = dice.randrange(max(1, len(piece) - 2000))
                return re.sub(r"\s+", "", piece[start : start + dice.randint(200, 1500)])


def messages_of(folder: Path, seed: int) -> Iterator[str]:
    """Yield lists of what Postgres says, from the catalogues in a folder of locales (LC_MESSAGES/*.mo), if any."""
    dice = random.Random(seed)
    for path in sorted(folder.glob("*/LC_MESSAGES/*.mo")):
        if path.name.startswith(POSTGRES):
            with path.open("rb") as file:
                catalogue: dict[object, object] = vars(GNUTranslations(file))["_catalog"]
            said = [text for key, text in catalogue.items() if key and isinstance(text, str)]
            dice.shuffle(said)
            for start in range(0, min(len(said), 400), 5):
                yield "\n".join(said[start : start + dice.randint(1, 5)])
