# What a tower takes counts in the step that computes it: decodes beside a large picture are not held up more than by as
# long a text.

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from gpu_backend.models.config.vision import vision_config
from gpu_backend.server.checkpoint.sight import Sight
from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.step.cost import StepCost, chunk_work, plan_work
from gpu_backend.step.messages import Generate
from gpu_backend.step.picture import Picture
from gpu_backend.step.plan import StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import counting_loop, greedy
from tests.support.tiny_vision import TINY_VISIONS

COST = StepCost(fixed=1.0, weights=0.0, token=0.01, context=0.0, pair=0.0)
PICTURE = Picture(20, 4, 99, b"p" * 16, 8, 8, b"", tower_tokens=40)
PROMPT = (*range(20), 99, 99, 99, 99, *range(30))


def test_chunk_ends_before_a_picture_that_would_stretch_the_step() -> None:
    """A step of one decode may take half as long again: 48 tokens, or 20 of them and no tower's 40."""
    loop, runner = counting_loop(
        64, step_cost=COST, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, prefix_caching=False
    )
    plans: list[StepPlan] = []
    run = runner.run

    def note(plan: StepPlan) -> object:
        plans.append(plan)
        return run(plan)

    runner.run = note  # type: ignore[method-assign, assignment]
    loop.handle(greedy("decodes", range(3)))
    loop.step()
    lengths = []
    for name, pictures in (("picture", (PICTURE,)), ("text", ())):
        loop.handle(Generate(name, PROMPT, SamplingParams(1, temperature=0.0), pictures=pictures))
        loop.step()
        lengths.append(len(plans[-1].sequences[1].token_ids))
        for _ in range(3):
            loop.step()

    assert lengths == [20, 50]


def test_work_of_a_step_has_the_tower_once() -> None:
    """In the chunk in which the picture begins, as it is planned and as it was computed."""
    loop, runner = counting_loop(64, max_num_batched_tokens=22, max_num_seqs=4, block_size=4)
    works = []
    run = runner.run

    def note(plan: StepPlan) -> object:
        works.append(plan_work(plan.sequences).towers)
        return run(plan)

    runner.run = note  # type: ignore[method-assign, assignment]
    loop.handle(Generate("picture", PROMPT, SamplingParams(1, temperature=0.0), pictures=(PICTURE,)))
    while loop.has_work():
        loop.step()

    assert works == [40, 0, 0]
    assert chunk_work(0, 20, (PICTURE,)).towers == 0 == chunk_work(21, 9, (PICTURE,)).towers
    assert COST.seconds(chunk_work(0, 21, (PICTURE,))) == COST.seconds(chunk_work(0, 61))


def test_tower_takes_more_for_each_patch_of_a_larger_picture() -> None:
    """Of which each looks at all others: four times the picture is more than four times the work."""
    vision = vision_config(TINY_VISIONS["Mistral 3"].config())
    assert vision is not None
    small, large = (vision.products(side, side) for side in (2, 4))
    layer = 4 * 32**2 + 3 * 32 * 48 + 2 * 32 * 16
    tokenizer = Tokenizer(BPE())
    tokenizer.decoder = decoders.ByteLevel()
    whole, codec = replace(vision, longest_side=64), TextCodec(tokenizer)
    sight = Sight(whole, codec, 1, 1, (), (2,), (3,), products_per_token=small)

    assert small == 16 * (2 * layer + 3 * 16 * 32) + 4 * (64**2 + 64 * (32 + 64))
    assert large > 4 * small
    assert (sight.tower_tokens(16, 16), sight.tower_tokens(32, 32)) == (1, round(large / small))
