# Words whose share of a prompt says something of its kind rather than of its subject: they carry over to subjects that
# nobody has seen. Lower case, as bytes; a word may be of several kinds.

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = {
    "negations": b"not except never least incorrect false without cannot neither nor no none",
    "conditions": b"if suppose assume assuming given let then unless whether",
    "comparisons": b"more less than each every per total times twice half most greater fewer equal remaining left",
    "tasks": b"calculate compute find solve prove determine evaluate derive simplify approximately value",
    "writing": b"write create generate implement function program code python list string sentence array return",
    "explaining": b"explain describe compare discuss summarize why reason because therefore thus",
    "facts": b"who when where whose name named called known first",
    "amounts": b"many much far long old",
    "questions": b"what which how why who when where",
    "references": b"following above below statement statements passage according refers refer best",
    "people": b"he she his her him they their man woman defendant plaintiff mr mrs boy girl son daughter",
    "speakers": b"i my me you your we our us",
    "grammar": b"the of and to in a is that for as by with on are it was from at an be or",
    "modals": b"can could would should may might must will likely probably usually often always",
}

# The last three letters of words: nouns made of other words, adjectives, and the forms of verbs.
ENDINGS = {
    "abstract_nouns": b"ion ity ism ess ent nce ogy ies",
    "adjectives": b"ous ive cal nal ial ble ary tic",
    "past_forms": b"ted ned red sed ied ked ded led ged ced ved ped med hed",
    "ing_forms": b"ing",
}


NAMES = (*KINDS, *ENDINGS)


def _classes() -> tuple[dict[bytes, int], dict[bytes, int], npt.NDArray[np.float64]]:
    """Return the class of each word and of each ending, and which of ``NAMES`` each class is, (classes, names).

    Class 0 is none of them.
    """
    of_word: dict[bytes, tuple[int, ...]] = {}
    for place, words in enumerate(KINDS.values()):
        for word in words.split():
            of_word[word] = (*of_word.get(word, ()), place)
    of_ending = {end: (len(KINDS) + place,) for place, ends in enumerate(ENDINGS.values()) for end in ends.split()}
    classes = [(), *dict.fromkeys((*of_word.values(), *of_ending.values()))]
    belongs = np.array([[float(place in kinds) for place in range(len(NAMES))] for kinds in classes])
    return (
        {word: classes.index(kinds) for word, kinds in of_word.items()},
        {end: classes.index(kinds) for end, kinds in of_ending.items()},
        belongs,
    )


_OF_WORD, _OF_ENDING, _BELONGS = _classes()


def shares_of(words: list[bytes]) -> npt.NDArray[np.float64]:
    """Return the share of the words that is of each kind and has each ending, as ``NAMES`` has them."""
    word, ending = _OF_WORD.get, _OF_ENDING.get
    classes = [word(each, 0) for each in words] + [ending(each[-3:], 0) for each in words]
    if not classes:
        return np.zeros(len(NAMES))
    return np.bincount(np.array(classes), minlength=len(_BELONGS)) @ _BELONGS * (1 / len(words))
