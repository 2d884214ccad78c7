# What a routing decision costs: choose_route with the shipped complexity model, over prompts of several lengths.
#   python -m benchmarks.router

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from billing.core.money import NanoDollars, to_nano
from billing.core.prices import Price
from protocol.chat import ChatRequest, Message
from protocol.inference import Request
from router import Capability, Catalog, Endpoint, ModelSpec, RoutingOptions, choose_route
from router.catalog.catalog import AutoRoute
from router.catalog.targets import TargetHealth
from router.complexity.classifier import Complexity
from router.learning import learned_from, packed_form
from router.recalibration import Comparison
from router.sticky import as_asked, turns_of
from router.team_score import TeamScore

SEED = 7
QUALITY = 0.8
ROUNDS = 2000
PROSE = " ".join(path.read_text() for path in sorted(Path("docs").glob("*.md"))).split()
NEW, KNOWN = "8 turns that waver, new", "8 turns that waver, known"
TAUGHT = "short, a team's own scores"


def main() -> None:
    catalog, complexity, dice = example_catalog(), Complexity.load(), random.Random(SEED)
    health = {target.key: TargetHealth(first_token_ms=300.0) for target in catalog.targets()}
    print(
        "One decision of choose_route over 4 models at 7 endpoints, in microseconds; last, CPU p50 of complexity alone."
    )
    heads = ("CPU p50", "CPU p99", "wall p50", "wall p99", "alone")
    print(f"{'prompt, of the words of docs/':>30} {' '.join(f'{head:>9}' for head in heads)}")
    for label, words, rounds in (
        ("short (12 words)", 12, ROUNDS),
        (TAUGHT, 12, ROUNDS),
        (NEW, 12, ROUNDS),
        (KNOWN, 12, ROUNDS),
        ("paragraph (120 words)", 120, ROUNDS),
        ("page (1,000 words)", 1_000, ROUNDS),
        ("100,000 words", 100_000, 300),
        ("32 MiB", 5_000_000, 20),
    ):
        judge = wavering(complexity) if label in (NEW, KNOWN) else complexity
        options = RoutingOptions(learned={"auto": taught(complexity, dice)} if label == TAUGHT else {})
        scores, cpu, wall = [], [], []
        for _ in range(rounds):
            asked, other = (conversation(dice, 8 if label in (NEW, KNOWN) else 1, words) for _ in range(2))
            if label == KNOWN:
                choose_route(as_asked(asked, turns_of(asked)[-2]), RoutingOptions(), catalog, health, judge)
            started = time.thread_time()
            complexity(other)
            scored, began = time.thread_time(), time.perf_counter()
            choose_route(asked, options, catalog, health, judge)
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - scored)
            scores.append(scored - started)
        figures = [_percentile(cpu, 0.5), _percentile(cpu, 0.99), _percentile(wall, 0.5), _percentile(wall, 0.99)]
        print(f"{label:>30} {' '.join(f'{figure:9.1f}' for figure in figures)} {_percentile(scores, 0.5):9.1f}")


def conversation(dice: random.Random, turns: int, words: int) -> ChatRequest:
    """Return a thread of user turns, each so many words from somewhere in the prose."""
    prose = PROSE if words < len(PROSE) else PROSE * (1 + words // len(PROSE))
    starts = [dice.randrange(len(prose) - words + 1) for _ in range(turns)]
    messages = [Message(role="user", content=" ".join(prose[start : start + words])) for start in starts]
    return ChatRequest(model="auto", messages=tuple(messages))


def taught(complexity: Complexity, dice: random.Random) -> TeamScore:
    """Return scores that 300 comparisons of paragraphs taught; what they showed is drawn."""
    requests = [conversation(dice, 1, 120) for _ in range(300)]
    compared = [Comparison(complexity(one), dice.random() < 0.7, 1, 2, False, packed_form(one)) for one in requests]
    learned = learned_from(compared)
    assert learned is not None
    return TeamScore(complexity, learned)


def wavering(complexity: Complexity) -> Callable[[Request], float]:
    """Return a judge that takes the trouble and finds every turn so near the quality that six more are looked at."""
    return lambda request: complexity(request) * 0 + QUALITY


def example_catalog() -> Catalog:
    """Return two small and two large models, two of them at two endpoints each; contexts that hold any prompt."""
    models = {
        name: ModelSpec(
            name=name,
            provider=provider,
            upstream_model=name,
            price=Price(input=to_nano(dollars), output=NanoDollars(4 * to_nano(dollars))),
            context=64_000_000,
            max_output=16_384,
            capabilities=frozenset({Capability.CHAT, Capability.TOOLS}),
        )
        for name, provider, dollars in (
            ("llama-3-70b", "own", "0.40"),
            ("gpt-4o-mini", "openai", "0.15"),
            ("claude-sonnet", "anthropic", "3"),
            ("gpt-4o", "openai", "2.50"),
        )
    }
    return Catalog(
        models,
        {
            "own": (Endpoint("local", "http://gpu-0:8100/v1"), Endpoint("local", "http://gpu-1:8100/v1")),
            "openai": (Endpoint("us", "https://us.example/v1"), Endpoint("eu", "https://eu.example/v1")),
            "anthropic": (Endpoint("us", "https://us.example"),),
        },
        {"auto": AutoRoute(small=("llama-3-70b", "gpt-4o-mini"), large=("claude-sonnet", "gpt-4o"), quality=QUALITY)},
        {},
        {},
    )


def _percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e6


if __name__ == "__main__":
    main()
