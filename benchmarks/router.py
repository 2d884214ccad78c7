# What a routing decision costs: choose_route with the shipped complexity model, over prompts of several lengths.
#   python -m benchmarks.router

from __future__ import annotations

import random
import time

from billing.money import NanoDollars, to_nano
from billing.prices import Price
from protocol.chat import ChatRequest, Message
from router import Ability, Catalog, Endpoint, ModelSpec, Wish, choose_route
from router.catalog import AutoRoute
from router.complexity import Complexity

SEED = 7
WAVERING = "8 turns that waver"  # so close to the quality asked that six earlier ones are looked at
ROUNDS = 3000
WORDS = (
    "the",
    "of",
    "a",
    "function",
    "sum",
    "prove",
    "why",
    "list",
    "river",
    "Paris",
    "integral",
    "x",
    "12",
    "=",
    "is",
)


def main() -> None:
    catalog, complexity, dice = example_catalog(), Complexity.load(), random.Random(SEED)
    print(
        "One decision of choose_route over 4 models at 7 endpoints, in microseconds; last, CPU p50 of complexity alone."
    )
    print(f"{'prompt':>24} {'CPU p50':>9} {'CPU p99':>9} {'wall p50':>9} {'wall p99':>9} {'alone':>9}")
    for label, words, rounds in (
        ("short (12 words)", 12, ROUNDS),
        (WAVERING, 12, ROUNDS),
        ("paragraph (120 words)", 120, ROUNDS),
        ("page (1,000 words)", 1_000, ROUNDS),
        ("100,000 words", 100_000, 300),
        ("32 MiB", 0, 100),
    ):
        huge = "word and " * (32 * 1024 * 1024 // 9) if not words else ""
        scores, cpu, wall = [], [], []
        for _ in range(rounds):
            prompt = huge or " ".join(dice.choices(WORDS, k=words))
            turns = 8 if label == WAVERING else 1
            request = ChatRequest(model="auto", messages=(Message(role="user", content=prompt),) * turns)
            started = time.thread_time()
            score = complexity(request)
            wish = Wish(quality=score if label == WAVERING else None)
            scored, began = time.thread_time(), time.perf_counter()
            choose_route(request, wish, catalog, {}, complexity)
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - scored)
            scores.append(scored - started)
        figures = [_percentile(cpu, 0.5), _percentile(cpu, 0.99), _percentile(wall, 0.5), _percentile(wall, 0.99)]
        print(f"{label:>24} {' '.join(f'{figure:9.1f}' for figure in figures)} {_percentile(scores, 0.5):9.1f}")


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
            abilities=frozenset({Ability.CHAT, Ability.TOOLS}),
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
        {"auto": AutoRoute(small=("llama-3-70b", "gpt-4o-mini"), large=("claude-sonnet", "gpt-4o"))},
        {},
        {},
    )


def _percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e6


if __name__ == "__main__":
    main()
