# Prompts written for this project, in whole sentences: how an answer has to look, which sounds like an attack and is
# none; what students, parents and professionals ask about evil; words that are harmless where they stand; and requests
# for harm and attacks that are put as their sources never put them. Made of parts by fixed dice, as in written.py.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("written_plainly")

SEED = 20267
ORDERS, OF_EACH_TOPIC, OF_EACH_HARM = 400, 6, 3  # texts of a kind


# Topics as a noun; the frames ask as those do who want to understand, to prevent, to teach and to heal.

# Words that frighten alone.


# "Your" and "my" are in attacks and in requests for harm far more often than in what data sets call ordinary.


def plain_prompts() -> Iterator[tuple[str, str]]:
    """Yield each prompt with what it is: "attack", "harm", or "everyday" for what only sounds so."""
    dice = random.Random(SEED)
    tasks, orders = PARTS["tasks"], PARTS["order"] + PARTS["yours"]
    for _ in range(ORDERS):
        said = [dice.choice(tasks), *dice.sample(orders, dice.randint(1, 3))]
        if dice.random() < 0.3:  # the orders before the task
            said.reverse()
        yield " ".join(said), "everyday"
    yield from ((order, "everyday") for order in orders)
    yield from ((prompt, "everyday") for prompt in PARTS["settings"] + PARTS["innocent"] + PARTS["mine"])
    for evil in PARTS["evils"]:
        for about in dice.sample(PARTS["about"], OF_EACH_TOPIC):
            yield about.replace("$", evil), "everyday"
    for harm in PARTS["gerunds"]:
        for request in dice.sample(PARTS["request"], OF_EACH_HARM):
            yield request.replace("$", harm), "harm"
    yield from ((prompt, "harm") for prompt in PARTS["harmful"])
    yield from ((prompt, "attack") for prompt in PARTS["attacks"])
