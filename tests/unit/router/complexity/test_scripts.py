# What is asked in another script, or on another keyboard, is judged as the same in plain English would be.

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from router.complexity.classifier import Complexity
from router.complexity.features import read_text
from tests.unit.router.examples import chat

QUALITY = 0.8  # of a route that says no other
LONG = "证明每个有限整环都是域，并且证明e是无理数。"

ASKED = {
    "Chinese": (
        "葡萄牙的首都是哪里？|给我妈妈写一张简短的生日贺卡。|怎么煮米饭？|给我五个猫的名字。|给我讲个笑话。",
        f"{LONG}|设计一个跨三个地区、保证恰好一次的支付系统，并说明其故障模式。"
        "|用C++实现一个无锁哈希表，并论证它在并发下为什么是正确的。|8个车有多少种放法，使得互不攻击且都不在对角线上？",
    ),
    "Japanese": (
        "ポルトガルの首都はどこですか？|母への短い誕生日カードを書いてください。|猫の名前を五つ考えて。|冗談を言って。",
        "すべての有限整域が体であること、およびeが無理数であることを証明せよ。"
        "|三つの地域にまたがり厳密に一度だけを保証する決済システムを設計し、故障モードを述べよ。"
        "|C++でロックフリーのハッシュマップを実装し、並行性の下で正しい理由を論じよ。",
    ),
    "Russian": (
        "Какая столица Португалии?|Напиши короткую открытку маме на день рождения.|Как сварить рис?|Расскажи шутку.",
        "Докажите, что каждая конечная область целостности является полем и что e иррационально."
        "|Спроектируйте платёжную систему с гарантией ровно одного исполнения в трёх регионах и опишите виды отказов."
        "|Реализуйте на C++ хеш-таблицу без блокировок и докажите её корректность при параллельном доступе.",
    ),
    "Arabic": (
        "ما هي عاصمة البرتغال؟|اكتب بطاقة عيد ميلاد قصيرة لأمي.|كيف أطبخ الأرز؟|احك لي نكتة.",
        "أثبت أن كل حلقة تامة منتهية هي حقل وأن e عدد غير نسبي."
        "|صمم نظام دفع يضمن التنفيذ مرة واحدة بالضبط عبر ثلاث مناطق واذكر أنماط فشله."
        "|نفذ جدول تجزئة بدون أقفال بلغة C++ وبين لماذا هو صحيح مع التزامن.",
    ),
    "German": (
        "Was ist die Hauptstadt von Portugal?|Schreib eine Geburtstagskarte für meine Mutter.|Wie koche ich Reis?",
        "Beweise, dass jeder endliche Integritätsbereich ein Körper ist und dass e irrational ist."
        "|Entwirf ein Zahlungssystem mit Garantie für genau eine Ausführung und nenne seine Fehlerarten."
        "|Implementiere in C++ eine sperrfreie Hashtabelle und begründe, warum sie unter Nebenläufigkeit korrekt ist.",
    ),
}


@pytest.mark.parametrize("language", ASKED)
def test_what_is_hard_is_hard_in_any_language(language: str) -> None:
    """Few words of another script are no small talk: what asks for a proof or a design goes to a large model."""
    complexity = Complexity.load()
    easy, hard = ([complexity(chat(text=text)) for text in texts.split("|")] for texts in ASKED[language])

    assert mean(hard) < mean(easy) - 0.1
    assert max(hard) < QUALITY


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("What’s the “capital” of\u00a0Portugal — and why…", 'What\'s the "capital" of Portugal - and why...'),
        ("Which?\r\nA. one\r\nB. two", "Which?\nA. one\nB. two"),
        (" \n Which river? \n\n", "Which river?"),
        ("为什么？", "为什么?"),
    ],
)
def test_keyboards_change_nothing(typed: str, plain: str) -> None:
    """Quotation marks, dashes, spaces and line ends of telephones and word processors are those of plain text."""
    one, other = read_text(typed), read_text(plain)

    assert np.array_equal(one.stats, other.stats) and np.array_equal(one.buckets, other.buckets)


def test_words_of_other_letters_borrow_no_weights() -> None:
    """They were not fitted; only those in letters that were are looked up."""
    assert len(read_text("Какая столица Португалии?").buckets) == len(read_text(LONG.replace("e", "")).buckets) == 0
    assert np.array_equal(read_text("Реализуйте Java, пожалуйста").buckets, read_text("Java").buckets)
