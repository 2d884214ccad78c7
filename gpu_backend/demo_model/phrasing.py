# The many ways people type one question. Training sees each written phrasing through these lenses, so that the model
# reads meaning where it could have learnt spelling: other openings, synonyms, case, punctuation, courtesy, slips.

from __future__ import annotations

import random
import re

# How a question may open instead; {} is the rest of it, without its closing mark.
_OPENINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"how do i (.+)",
        (
            "how can I {}",
            "how do you {}",
            "how do we {}",
            "how does one {}",
            "how to {}",
            "how could I {}",
            "how would I {}",
            "how should I {}",
            "tell me how to {}",
            "show me how to {}",
            "explain how to {}",
            "what is the way to {}",
            "what's the best way to {}",
            "what do I do to {}",
            "what do I need to {}",
            "I want to {}",
            "I need to {}",
            "I'd like to {}",
            "is there a way to {}",
            "can you tell me how to {}",
            "can you help me {}",
            "help me {}",
            "any idea how to {}",
        ),
    ),
    (
        r"what (?:is|are) ((?:\S+ ?){1,5})",
        (
            "what's {}",
            "what exactly is {}",
            "explain {}",
            "define {}",
            "describe {}",
            "tell me about {}",
            "tell me what {} is",
            "can you explain {}",
            "what does {} mean",
            "what do you mean by {}",
            "what is meant by {}",
            "I don't know what {} is",
            "give me a definition of {}",
            "could you explain what {} is",
            "I would like to know what {} is",
            "do you know what {} is",
        ),
    ),
    (
        r"how does (.+) work",
        (
            "explain how {} works",
            "tell me how {} works",
            "can you explain how {} works",
            "how {} works",
            "how is {} done",
            "describe how {} works",
            "what is the idea behind {}",
            "I don't understand how {} works",
        ),
    ),
    (
        r"can i (.+)",
        (
            "is it possible to {}",
            "may I {}",
            "am I able to {}",
            "could I {}",
            "can we {}",
            "can you {}",
            "is there a way to {}",
            "am I allowed to {}",
            "can one {}",
            "does it let me {}",
        ),
    ),
    (
        r"does tollgate (.+)",
        (
            "can Tollgate {}",
            "will Tollgate {}",
            "is Tollgate able to {}",
            "do you {}",
            "does it {}",
            "does this service {}",
            "does the gateway {}",
            "is it true that Tollgate can {}",
        ),
    ),
    (
        r"how does tollgate (.+)",
        (
            "how do you {}",
            "how does it {}",
            "in what way does Tollgate {}",
            "how can Tollgate {}",
            "explain how Tollgate can {}",
            "how does the service {}",
        ),
    ),
    (
        r"what happens (?:when|if) (.+)",
        (
            "what happens when {}",
            "what happens if {}",
            "what if {}",
            "what does Tollgate do when {}",
            "what does Tollgate do if {}",
            "what will happen if {}",
            "what would happen if {}",
            "what occurs when {}",
            "what follows when {}",
            "and if {}",
        ),
    ),
    (r"where (?:is|are) (.+)", ("where do I find {}", "where can I find {}", "where do I see {}", "where's {}")),
    (r"where do i (.+)", ("where can I {}", "where should I {}", "where would I {}", "how do I {}")),
    (r"which (.+)", ("what {}", "tell me which {}", "do you know which {}")),
    (r"why (.+)", ("how come {}", "what is the reason {}", "tell me why {}", "explain why {}")),
    (r"is there (.+)", ("do you have {}", "does Tollgate have {}", "does it have {}", "is there really {}")),
    (r"how (?:many|much) (.+)", ("tell me how many {}", "how much {}", "how many {}", "what number of {}")),
    (r"how (long|fast|big|large) (.+)", ("tell me how {}", "do you know how {}")),
)

_SYNONYMS: dict[str, tuple[str, ...]] = {
    "answer": ("reply", "response", "respond"),
    "answers": ("replies", "responses"),
    "ask": ("request", "query"),
    "begin": ("start",),
    "big": ("large", "huge"),
    "breaks": ("fails", "dies", "is cut"),
    "budget": ("limit", "allowance", "quota"),
    "call": ("request",),
    "calls": ("requests",),
    "change": ("edit", "modify", "alter", "update"),
    "cheap": ("inexpensive", "low-cost"),
    "check": ("verify", "validate", "test"),
    "choose": ("pick", "select", "decide on"),
    "cost": ("price", "charge", "expense"),
    "costs": ("prices", "charges", "expenses"),
    "crashes": ("dies", "fails", "is killed"),
    "create": ("make", "add", "set up"),
    "delete": ("remove", "erase"),
    "does": ("will",),
    "fails": ("breaks", "goes wrong", "dies"),
    "fast": ("quick", "speedy"),
    "find": ("see", "get", "look up"),
    "gateway": ("gate way", "proxy", "service"),
    "get": ("obtain", "receive", "have"),
    "happens": ("occurs", "follows"),
    "install": ("set up", "setup"),
    "key": ("API key", "team key", "token", "api key"),
    "keys": ("API keys", "team keys", "api keys"),
    "laptop": ("computer", "notebook", "machine"),
    "learn": ("find out", "know"),
    "limit": ("cap", "quota", "bound"),
    "limits": ("caps", "quotas", "bounds"),
    "machine": ("computer", "server", "box", "host"),
    "mean": ("stand for", "say"),
    "means": ("says",),
    "model": ("LLM", "language model"),
    "models": ("LLMs", "language models"),
    "money": ("dollars", "cash"),
    "need": ("require", "have to have"),
    "people": ("users", "folks"),
    "pick": ("choose", "select"),
    "price": ("cost", "rate"),
    "prices": ("costs", "rates"),
    "program": ("app", "application", "client"),
    "report": ("overview", "summary"),
    "request": ("call", "query"),
    "requests": ("calls", "queries"),
    "revoke": ("cancel", "disable", "invalidate"),
    "run": ("start", "launch", "execute"),
    "see": ("view", "look at", "check", "find"),
    "send": ("submit", "post", "make"),
    "show": ("display", "print", "list"),
    "start": ("run", "launch", "begin", "boot"),
    "stop": ("end", "shut down", "quit", "kill"),
    "stopped": ("down", "gone"),
    "team": ("group", "tenant"),
    "teams": ("groups", "tenants"),
    "try": ("test", "try out"),
    "usage": ("consumption", "use"),
    "use": ("utilise", "employ", "work with"),
    "want": ("need", "wish"),
    "work": ("function", "operate"),
    "works": ("functions", "operates"),
    "wrong": ("bad", "incorrect", "invalid"),
}

_BEFORE = (
    "Please tell me: ", "Hi, ", "Hello, ", "Hey, ", "Hey! ", "Hi! ", "Quick question: ", "I have a question. ", "Okay, ",
    "So, ", "Please: ", "Tell me, ", "Now, ", "And ", "Also, ", "Well, ", "Good morning. ", "Question: ", "Excuse me, ",
    "I am new here. ", "One more thing: ", "Thanks. ", "Great, ", "I wonder, ", "Can you tell me, ", "Please answer: ",
    "I'm just curious: ", "Please, ", "Sorry, ", "Hmm, ", "Answer in one sentence: ", "Briefly: ", "In short, ", "Do you know, ",
    "We are a team of five. ", "For our team: ", "My boss asks: ", "ok ", "In Tollgate, ", "With Tollgate, ", "About Tollgate: ",
)  # fmt: skip
_AFTER = (
    " please", ", please", " Please.", " Thanks!", " Thank you.", " thanks", " Answer in one sentence.", " Be brief.", " In short.",
    " Please answer briefly.", " Keep it short.", " Explain.", " Explain it to me.", " I am new here.", " in one sentence", " briefly",
    " Tell me.", " exactly", " then", " here", " today", " in a few words", " in simple words", " Please explain.", " Thanks in advance!",
    " Can you help?", " I need to know.", " Do you know?", " Use plain words.", " in detail", " again", " right now", " Give me one sentence.",
)  # fmt: skip
_SERVICE = (
    "it",
    "this",
    "this service",
    "the service",
    "the gateway",
    "your service",
    "toll gate",
    "TollGate",
    "tollgate",
)
_SMALL_WORDS = frozenset(
    "a an the do does did is are was be to of in on at for with my i me you we it this that can could would should and or so "
    "please there have has will from by as".split()
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def vary(question: str, rng: random.Random) -> str:
    """One way a person could have typed ``question``; about one in six comes back as written."""
    if rng.random() < 0.16:
        return question
    text, mark = _split_mark(question)
    if rng.random() < 0.45:
        text = _reopen(text, rng)
    if rng.random() < 0.5:
        text = _swap_words(text, rng, share=rng.choice((0.2, 0.5)))
    if rng.random() < 0.06:
        text = re.sub(r"\b[Tt]ollgate\b", lambda _: rng.choice(_SERVICE), text, count=1)
    text = _contract(text, rng)
    if rng.random() < 0.15:
        text = _drop_small_words(text, rng, share=rng.choice((0.2, 0.3, 1.0)))
    text = _frame(text, mark, rng)
    if rng.random() < 0.12:
        text = _mistype(text, rng)
    return _recase(text, rng)


def _split_mark(question: str) -> tuple[str, str]:
    stripped = question.rstrip("?.!")
    return stripped, question[len(stripped) :]


def _reopen(text: str, rng: random.Random) -> str:
    fitting = [
        (found, others) for pattern, others in _OPENINGS if (found := re.fullmatch(pattern, text, re.IGNORECASE))
    ]
    if not fitting:
        return text
    found, others = rng.choice(fitting)
    rest = " ".join(found.groups())
    opened = rng.choice(others).format(rest)
    return opened[0].upper() + opened[1:]


def _swap_words(text: str, rng: random.Random, share: float) -> str:
    def swap(match: re.Match[str]) -> str:
        others = _SYNONYMS.get(match[0].lower())
        return rng.choice(others) if others and rng.random() < share else match[0]

    return _WORD.sub(swap, text)


def _contract(text: str, rng: random.Random) -> str:
    if rng.random() < 0.3:
        text = re.sub(r"\b([Ww]hat|[Ww]here|[Ww]ho|[Hh]ow) is\b", r"\1's", text)
        text = re.sub(r"\b(do|does|is|are|can|did)( no|n)t\b", r"\1nt" if rng.random() < 0.3 else r"\1n't", text)
    elif rng.random() < 0.3:
        text = re.sub(r"\b([Ww]hat|[Ww]here|[Ww]ho)'s\b", r"\1 is" if rng.random() < 0.6 else r"\1s", text)
    return text


def _drop_small_words(text: str, rng: random.Random, share: float) -> str:
    kept = [word for word in text.split() if word.lower() not in _SMALL_WORDS or rng.random() > share]
    return " ".join(kept) if len(kept) > 1 else text


def _frame(text: str, mark: str, rng: random.Random) -> str:
    if rng.random() < 0.2:
        before = rng.choice(_BEFORE)
        keeps_capital = (
            before.rstrip()[-1] in ".!" or not text[:1].isupper() or text[1:2].isupper() or text.startswith("I ")
        )
        text = before + (text if keeps_capital or text.startswith("Tollgate") else text[:1].lower() + text[1:])
    after = rng.choice(_AFTER) if rng.random() < 0.18 else ""
    if after[1:2].isupper():
        return text + mark + after
    return text + after + _close(mark, rng)


def _close(mark: str, rng: random.Random) -> str:
    if rng.random() < 0.7:
        return mark
    return rng.choice(("", "", "", "?", "??", " ?", ".", "!", "...", "?!", "\n"))


def _mistype(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if len(word) > 3]
    if not places:
        return text
    place = rng.choice(places)
    word = words[place]
    at = rng.randrange(1, len(word) - 1)
    slips = (
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],  # two letters swapped
        word[:at] + word[at + 1 :],  # one missing
        word[:at] + word[at] + word[at:],  # one doubled
        word[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[at + 1 :],  # a neighbour's key
    )
    words[place] = rng.choice(slips)
    return " ".join(words)


def _recase(text: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.28:
        return text.lower()
    if draw < 0.34:
        return text.upper()
    if draw < 0.37:
        return text.title()
    return text
