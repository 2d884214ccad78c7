# Open chat, written for this project, because the outcomes are of exams: kinds of prompts that users type all day, and
# how often a small model's answer to such is as good. The chances are beliefs, not measurements: they are what one
# would bet on before asking, and weigh little. Shadow traffic measures what is true of a team's own traffic.

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

SEED = 20268
EACH = 60  # prompts of a kind, at most


class Kind(NamedTuple):
    """One kind of prompt."""

    chance: float  # that a small model's answer is as good as a large one's
    frames: str  # split at "|"; "$" stands for one of the fills
    fills: str = ""


KINDS = {
    "talk": Kind(
        0.96,
        """hi|Hello!|Hey there|Good morning|Thanks!|Thank you, that helped|Great, thanks|ok|Yes please|No, that's all
Can you help me?|How are you?|Who are you?|Sounds good|Are you there?|Tell me a joke|Tell me something nice|Bye
I have a question|Can I ask you something?|You are funny|That's not what I meant|Try again|Go on|Continue
Never mind|What can you do?|lol|Nice|Sure, go ahead|One more please|I am bored|Good night|Let's talk|Test""",
    ),
    "fact": Kind(
        0.93,
        """What is $?|Where is $?|Tell me about $.|How old is $?|Give me a fun fact about $.|Is $ famous?
What is $ known for?""",
        """the capital of Portugal|the Eiffel Tower|the tallest mountain in Africa|a rhombus
the boiling point of water
the Great Wall|a leap year|the longest river in Asia|Mozart|Mount Fuji|a prime number|an adverb|the euro|Stonehenge
a haiku|sushi|the Milky Way|a koala|the Olympic Games|rhubarb|the zodiac|Machu Picchu|a solar panel|GDP|a PDF|DNS""",
    ),
    "edit": Kind(
        0.92,
        """Fix the spelling: $|Translate into Spanish: $|Make this shorter: $|Make this more polite: $
Rewrite in past tense: $
Correct the grammar: $|Turn this into a question: $|Is this positive or negative? $|Extract the names: $
Put this in bullet points: $
Summarize in one sentence: $|Translate to French: $|Make it sound friendlier: $|Give this text a title: $
Write this in capitals: $""",
        """The shop is close on mondays and we was late.|Please send Anna and Tom the report until Friday.
I loved the hotel but the breakfast was cold.|We regret to tell you that the train to Lyon is cancelled today.
The team met on Tuesday, agreed on the budget, and moved the launch to May.|your order has been shiped
Come here at once!
The soup was awful and the waiter rude.|Mr. Ortiz will call Ms. Chen about the invoice.
I am not able to come to the party.
The new phone has a better camera, a bigger battery and a lower price.|Where is the nearest pharmacy?""",
    ),
    "write": Kind(
        0.9,
        """Write $ for my mother|Write $ about spring|Write me $ for my colleague|Write $ for a small bakery
I need $ for a friend
Draft $ for our club|Come up with $ about coffee|Write $ in a cheerful tone|Give me $ for a wedding""",
        """a short poem|a birthday card|a limerick|a thank-you note|a slogan|a two-line joke|an Instagram caption
a short email
a product description|a toast|a bedtime story|a rhyme|an invitation|a headline|a list of name ideas|a tweet
a haiku""",
    ),
    "explain": Kind(
        0.88,
        """Explain $ to a child|What is $ in simple words?|How does $ work?|Why do we need $?
Explain $ in two sentences
What is the difference between $ and something similar?|Give me an example of $|What are the benefits of $?""",
        """photosynthesis|inflation|a mortgage|gravity|a rainbow|an API|machine learning|the water cycle
compound interest
a vaccine|recycling|meditation|a blockchain|electricity|the stock market|a search engine|yeast|a metaphor
a thermostat""",
    ),
    "advice": Kind(
        0.9,
        """How do I $?|Tips to $|What is the best way to $?|Give me five ideas to $|I want to $, where do I start?
Can you help me $?""",
        """sleep better|cook rice|save money|learn to swim|clean a pan|plan a birthday party|pack for a weekend
write a CV
remove a stain|train a puppy|find a hobby|grow basil|stay focused|make friends in a new city|prepare for an interview
choose a laptop|eat more vegetables|organize my desk|get up early|say no politely|spend a day in Lisbon""",
    ),
    "short code": Kind(
        0.85,
        """Write a Python function that $|Write a JavaScript function that $|How do I write code that $?
One line of Python that $
Show me a simple example that $|Write a small script that $""",
        """adds two numbers|reverses a string|counts the words in a text|prints the numbers from 1 to 10
finds the largest number in a list
reads a file|sorts names alphabetically|checks if a number is even|removes duplicates from a list|says hello
converts Celsius to Fahrenheit|joins two lists|rounds a number|shows today's date|opens a web page|renames a file""",
    ),
    "short sums": Kind(
        0.88,
        """What is $?|Calculate $|How much is $?|Compute $ for me""",
        """2 + 2|15 times 12|20 percent of 80|144 divided by 12|the square root of 81|half of 37|7 squared
1000 minus 345
3/4 plus 1/8|the average of 4, 8 and 9|12 euros with 19 percent tax|the area of a 3 by 5 rectangle
10 miles in kilometers
90 minutes in hours|the next number after 2, 4, 8, 16""",
    ),
    "hard code": Kind(
        0.5,
        """Implement $ in C++ and argue why it is correct under concurrency
Implement $ in Rust without unsafe code, with tests
Write $ in Go that survives crashes and scales to many cores
My implementation of $ deadlocks under load; list the likely causes and how to prove each
Refactor $ to be generic over its storage while keeping its guarantees
Optimize $ for cache locality and explain the complexity
Write $ from scratch, handle all edge cases and give the invariants|Review this design of $ and find its races""",
        """a lock-free hash map|a B-tree with concurrent writers|a Raft log with snapshots|a work-stealing scheduler
a garbage collector
a parser for a language with operator precedence|a distributed rate limiter|an event-sourced ledger
a query planner with join reordering
a memory allocator|a compiler pass that does register allocation|a transactional key-value store
a streaming JSON parser
a type checker with inference|an LSM tree|a consistent hash ring with replicas|a regex engine without backtracking""",
    ),
    "hard mathematics": Kind(
        0.42,
        """Prove that $.|Prove or disprove that $.|Show that $, and generalize the result.
Give two different proofs that $.
Explain rigorously why $.|Derive step by step that $.""",
        """every finite integral domain is a field|the harmonic series diverges
there are infinitely many primes congruent to 3 modulo 4
a bounded sequence in a Hilbert space has a weakly convergent subsequence|the real numbers are uncountable
no polynomial represents only primes
every tree with n vertices has n minus 1 edges|the halting problem is undecidable
a continuous image of a compact set is compact
the expected number of fixed points of a random permutation is 1
the determinant of a Vandermonde matrix is the product of the differences
e is irrational|the number of spanning trees of a complete graph is n to the n minus 2|the sample variance is unbiased
a group of order p squared is abelian|the heat equation smooths its initial data
every planar graph is five-colorable""",
    ),
    "problems": Kind(
        0.48,
        """$ Explain every step.|$ Give the exact answer.|Solve this: $|$ Find all solutions.
$ Check the result in a second way.""",
        """Five friends sit in a row; Ann is not next to Ben, Carl sits left of Dora, Eve at an end. Where can Ann sit?
How many integers below 1000 are divisible by 3 or 7 but not by both?
A pipe fills a tank in 6 hours, another in 4, and a leak empties it in 12. How long does it take with all three?
Two trains start 420 km apart at 70 and 50 km/h, the second half an hour later. Where do they meet?
Find all real x with x^4 - 5x^2 + 4 = 0 and x^3 > x.|Integrate x^2 e^(-x) sin x from 0 to infinity.
In how many ways can 8 rooks be placed on a chessboard so that none attacks another and none stands on the diagonal?
I pay 3 for the first ticket and half of the price before for each other one. When do I have paid 5.9?
Three switches, one lamp in another room, one visit. And with four switches and two lamps?
Compute the eigenvalues of [[1,2],[2,1]] and of its tenth power.
A fair coin is tossed until two heads follow each other. How many tosses are expected?
You have 12 balls, one of another weight, and a balance; find it in three weighings.
Let a_n = 3 a_(n-1) - 2 a_(n-2), a_0 = 1 and a_1 = 4. Find a closed form and the value modulo 7 of a_100.""",
    ),
    "expert": Kind(
        0.62,
        """$ Discuss the evidence on both sides.|$ Weigh the arguments and take a position.
$ Name the relevant studies or rulings.
$ Give a differential and the next steps.|$ Explain the mechanism in depth for a specialist.
$ Which assumptions does this rest on?""",
        """A patient on warfarin has a new rash, low platelets and a cold foot.
Does the second law of thermodynamics follow from mechanics?
May a platform be liable for what its recommendation algorithm shows?
Why did the Bronze Age states collapse within a lifetime?
Is monetary policy effective when rates are at zero?|How does a transformer's attention differ from a kernel smoother?
A child has recurrent fever, mouth ulcers and swollen glands every four weeks.
How should a court treat a contract that both parties misread?
What does CRISPR base editing change that cutting does not?|Is consciousness compatible with physicalism?
Which tax rules apply to a share swap between a German and a Brazilian company?
How robust is the instrumental variable in this study design?
Why do turbulent flows have a power law of energy?
When is a mixed strategy the only equilibrium of a repeated game?""",
    ),
    "design": Kind(
        0.6,
        """Design $. State the trade-offs, the failure modes and how each is tested.
Write an architecture document for $.
Plan the migration of $ without downtime.|Compare three architectures for $ and recommend one.
Review this plan for $ and list its risks.
Estimate the capacity and the cost of $ for ten million users.""",
        """a payment system with exactly-once guarantees|a multi-region database with bounded staleness
a feature store for fraud detection
a chat service with end-to-end encryption|a data warehouse with row-level permissions
a scheduler for GPU jobs of many teams
a search index over a billion documents|an audit log that nobody can change|a billing pipeline with late events
a mobile app that works offline and merges edits|a monorepo's build cache|a real-time bidding platform""",
    ),
    "long orders": Kind(
        0.66,
        """Write a 1500-word essay on $ with an abstract, three sections, counterarguments and at least five references.
Write a business plan for $ with market, competitors, a budget table and risks, in a formal tone, without bullet points.
Draft a contract for $ that covers liability, termination, data protection and disputes under Swiss law.
Rewrite the following chapter about $ in the style of Jane Austen, keep every fact, and end each paragraph by asking.
Make a four-week course on $ with goals, daily exercises, solutions and an exam.
Turn this transcript about $ into minutes: decisions, owners, deadlines, open questions, no small talk.""",
        """urban farming|a chain of climbing halls|the ethics of cloning|a shared warehouse|deep-sea mining
a school for adults
remote work|a vineyard|public transport|open-source licences|a bike rental|statistics for nurses""",
    ),
}


class Prompt(NamedTuple):
    """A written prompt."""

    text: str
    kind: str
    suffices: bool  # as often among its kind as is believed


def written_prompts() -> Iterator[Prompt]:
    """Yield the prompts of every kind, of which as many have a small model suffice as its chance says."""
    dice = random.Random(SEED)
    for name, kind in KINDS.items():
        frames, fills = _parts(kind.frames), _parts(kind.fills)
        texts = list(dict.fromkeys(frame.replace("$", fill) for frame in frames for fill in fills))
        chosen = dice.sample(texts, min(EACH, len(texts)))
        enough = round(kind.chance * len(chosen))
        yield from (Prompt(text, name, place < enough) for place, text in enumerate(chosen))


def _parts(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")
