# The reckoning that stands beside a card's figures: at its best it is the roofline, and everything asked for is made.

from __future__ import annotations

import pytest

from benchmarks.predicted import BEST, CARD, Shape, play
from benchmarks.roofline import MIXTURES, SHAPES, Request, least_seconds
from gpu_backend.models.config.model import parse_model_config

REQUESTS = [Request((0,) * (100 + 37 * i), 40 + 11 * i) for i in range(20)]


@pytest.mark.parametrize("name", SHAPES)
def test_at_its_best_it_is_the_roofline(name: str) -> None:
    """With all of the datasheet reached and launches for nothing it is that, and little more: what goes on between
    products, logits, and weights that are read beside prompts.
    """
    played = play(Shape(parse_model_config(SHAPES[name]), reached=BEST), REQUESTS, 256, 8192)
    least = least_seconds(SHAPES[name], [(len(r.prompt), r.output) for r in REQUESTS], CARD)

    assert 1.0 <= played.seconds / least < 1.1
    assert played.made == sum(request.output for request in REQUESTS) and len(played.waits) == len(REQUESTS)
    assert played.seconds == pytest.approx(sum(played.spent.values()))


def test_mixture_reads_the_experts_of_its_tokens() -> None:
    """One reply of Mixtral reads two of eight experts, 256 replies all of them; memory has all, whatever is read."""
    model = parse_model_config(MIXTURES["Mixtral-8x7B"])
    one, many = (Shape(model, reached=BEST).seconds(count, 0)["weights"] * CARD.bandwidth / 2 for count in (1, 256))

    assert one == pytest.approx(12.6e9, rel=0.01) and many == pytest.approx(model.weights_read())
    assert many > 3.6 * one


def test_fewer_places_and_later_arrivals_take_longer() -> None:
    shape = Shape(parse_model_config(SHAPES["Llama-3.1-8B"]))
    together = play(shape, REQUESTS, 256, 8192)

    assert play(shape, REQUESTS, 4, 8192).seconds > 2 * together.seconds
    late = play(shape, REQUESTS, 256, 8192, [float(i) for i in range(20)])
    assert late.seconds > 19 and max(late.waits) < max(together.waits)


def test_launches_of_small_batches_are_fewer() -> None:
    """Seven a layer for one reply in both precisions; at 64 ten and fourteen less the parts of attention."""
    plain, fp8 = (Shape(parse_model_config(SHAPES["Llama-3.1-8B"]), some) for some in (False, True))

    assert plain.launches(1, 560) == fp8.launches(1, 560) == 7 * 32 + 14
    assert (plain.launches(64, 64 * 560), fp8.launches(64, 64 * 560)) == (9 * 32 + 14, 13 * 32 + 14)
