# Pictures on a real tiny model: a reply in a busy engine is token for token what it is alone in a plain one, whatever
# becomes of its prompt's blocks. test_logits.py holds their logits to transformers.

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx
import pytest
import torch
from torch import Tensor

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.draft_model import _draft_step
from gpu_backend.execution.loading import load_pictures
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, load_vision_config
from gpu_backend.models.config.vision import PixtralConfig, vision_config
from gpu_backend.models.shards import stage_of
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import Command, Event, Generate
from gpu_backend.step.picture import PicturePart, parts_of
from gpu_backend.step.plan import Launched, SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import Answer, answer_all, draft_from, expect_short_replies, model_loop
from tests.support.fake_engine import FakeEngine
from tests.support.front import CHAT, running_front, token_ids
from tests.support.kv_transfer import exchanging, prefill
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_vision import (
    TINY_VISIONS,
    TinyVision,
    draw_picture,
    draw_tokens,
    with_pictures,
    write_tiny_vision,
)

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {"prefix_caching": False, "max_num_seqs": 1, "block_size": 4, "max_model_len": 96}
BUSY: dict[str, Any] = PLAIN | {
    "prefix_caching": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_kv_blocks": 25,
    "host_kv_bytes": 2**20,
}
FLAT = StepCost(fixed=1.0, weights=0.0, token=1e-6, context=0.0, pair=0.0)
Replies = dict[tuple[str, int], Answer]


class Each(NamedTuple):
    """A tiny model that sees, the settings of a busy engine for it, and its replies one by one in a plain one."""

    folder: Path
    busy: dict[str, Any]
    alone: dict[tuple[str, int], list[int]]


# By name; a Gemma 3's has the least step with room for its pictures, which are smaller.
BUSY_OF = {
    "Mistral 3": BUSY,
    "Qwen2.5-VL": BUSY | {"max_model_len": 80, "num_kv_blocks": 20},
    "Qwen3-VL": BUSY | {"max_model_len": 80, "num_kv_blocks": 20},
    "Gemma 3": BUSY | {"max_num_batched_tokens": 26, "max_model_len": 72, "num_kv_blocks": 19},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision(tmp_path_factory.mktemp("sees"), with_tokenizer=True)


# A Qwen3-VL's tokens turn as a Qwen2.5-VL's do; the latter's tower alone is not what the engine goes by.
EACH = [pytest.param(name, marks=[pytest.mark.soak] * (name == "Qwen2.5-VL")) for name in BUSY_OF]


@pytest.fixture(scope="module", params=EACH)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Each:
    """A model of each kind of tower, and what its requests are answered alone."""
    seer = write_tiny_vision(tmp_path_factory.mktemp("sees"), TINY_VISIONS[request.param])
    loop, found = model_loop(seer, **PLAIN), {}
    for command in asked_of(seer):
        found |= tokens_of(answer_all(loop, [command]))
    return Each(seer, BUSY_OF[request.param], found)


def ask(
    folder: Path, name: str, pictures: list[Tensor], start: int = 5, after: Sequence[int] = (7, 8, 9), **fields: Any
) -> Generate:
    """Ask of a prompt with words around each picture."""
    prompt, placed = with_pictures(folder, [range(start), *(after for _ in pictures)], pictures)
    sampling = SamplingParams(max_tokens=16, temperature=0.7, seed=len(name))
    return Generate(name, prompt, sampling, pictures=placed, **fields)


def asked_of(folder: Path) -> list[Generate]:
    """Return requests some of whose prompts differ in nothing but the picture."""
    one, other, wide = draw_tokens(folder, 3, 4), draw_tokens(folder, 3, 4, 1), draw_tokens(folder, 8, 2, 2)
    return [
        ask(folder, "one", [one]),
        ask(folder, "other words", [one], after=(3, 3)),
        ask(folder, "another", [other]),
        ask(folder, "both", [one, other], n=2),
        ask(folder, "the other way round", [other, one]),
        ask(folder, "wide", [wide], start=9),
        ask(folder, "three", [one, wide, one]),
        Generate("words", tuple(range(30)), SamplingParams(max_tokens=16, seed=1)),
    ]


def tokens_of(replies: Replies) -> dict[tuple[str, int], list[int]]:
    return {key: reply.token_ids for key, reply in replies.items()}


@pytest.mark.parametrize(
    "more",
    [
        {"async_scheduling": True, "cuda_graphs": True},
        # A draft model's are verified by the same rule, and there are more of them.
        pytest.param({"speculative_method": "ngram", "num_speculative_tokens": 3}, marks=pytest.mark.soak),
        {"speculative_method": "draft", "num_speculative_tokens": 3, "async_scheduling": True},
        {"copy_seconds": 0.0, "step_cost": FLAT, "step_stretch": 1e9},  # so that it swaps
    ],
    ids=lambda more: ",".join(more),
)
def test_replies_in_a_busy_engine_are_those_alone(more: dict[str, Any], each: Each) -> None:
    """In chunks, smaller than a picture where that may be cut, preempted, swapped, drafted for, resumed, from a cache
    and from graphs."""
    folder, alone = each.folder, each.alone
    model = {"speculative_model": str(folder)} if more.get("speculative_method") == "draft" else {}
    invariant = {"batch_invariant": "step_cost" in more and each.busy is BUSY}
    loop = model_loop(folder, **(each.busy | more | invariant), **model)
    if more.get("speculative_method") == "ngram":
        draft_from(loop, alone, 0.8)
    expect_short_replies(loop)
    known = tuple(alone["wide", 0][:4])
    commands = [
        replace(command, resume_token_ids=known) if command.request_id == "wide" else command
        for command in asked_of(folder)
    ]

    found = tokens_of(answer_all(loop, commands))
    again = tokens_of(answer_all(loop, commands[:2]))

    assert found == alone | {("wide", 0): alone["wide", 0][4:]}
    assert again.items() <= alone.items()
    assert loop.scheduler.running.num_preempted > 0
    assert loop.scheduler.running.num_swapped == (loop.scheduler.running.num_preempted if "step_cost" in more else 0)
    assert loop.scheduler.tables.prompt_tokens_found > 0
    assert alone["one", 0] != alone["another", 0]


def test_a_cached_beginning_may_end_within_a_picture(each: Each) -> None:
    """The rest of its tokens looks at all of them all the same."""
    asked = [
        [ask(each.folder, "any", [draw_tokens(each.folder, 3, 4)], start, after) for after in ([7], [3, 3])]
        for start in range(4)
    ]
    first, second = next(both for both in asked if (both[0].pictures[0].end + 1) % 4 > 1)
    (picture,) = second.pictures
    (alone,) = answer_all(model_loop(each.folder, **PLAIN), [second]).values()
    loop = model_loop(each.folder, **PLAIN | {"prefix_caching": True})

    answer_all(loop, [first])
    (answer,) = answer_all(loop, [second]).values()

    assert picture.start < answer.events[0].cached_tokens < picture.end
    assert answer.token_ids == alone.token_ids


def test_a_picture_that_looks_both_ways_is_computed_whole(tmp_path: Path) -> None:
    """However little a step would take by its cost; a step that never has room for it is refused at the start."""
    folder = write_tiny_vision(tmp_path, TINY_VISIONS["Gemma 3"])
    slow = StepCost(fixed=1e-6, weights=0.0, token=1.0, context=0.0, pair=0.0)
    settings = PLAIN | {"max_num_seqs": 4, "max_num_batched_tokens": 22}
    commands = asked_of(folder)[:4]
    parts: list[PicturePart] = []
    loop = model_loop(folder, **settings, step_cost=slow, step_stretch=1.0)
    launch = loop.runner.launch

    def noted(plan: StepPlan) -> Launched:
        parts.extend(part for step in plan.sequences for part in step.pictures)
        return launch(plan)

    with patch.object(loop.runner, "launch", noted):
        answer_all(loop, commands)

    assert len(parts) == sum(len(command.pictures) for command in commands)
    assert {len(part.rows) for part in parts} == {9}
    for wrong, words in (
        ({"max_num_batched_tokens": 21}, "max_num_batched_tokens must be at least 22"),
        ({"max_batch_tier_tokens": 12}, "max_batch_tier_tokens must be at least 13"),
        ({"batch_invariant": True}, "batch_invariant computes token by token"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            model_loop(folder, **(settings | wrong))
        assert model_loop(folder, **(settings | wrong), max_images=0)


def test_what_drafts_sees_no_pictures(folder: Path) -> None:
    """The tokens that a draft model lacks are others than those of the step, among which the pictures lie."""
    command = ask(folder, "any", [draw_tokens(folder, 3, 4)])
    prompt = command.prompt_token_ids
    parts = parts_of(command.pictures, prompt, 0, len(prompt))
    step = SequenceStep(0, prompt, 0, (0,), True, command.sampling, 0, pictures=parts, draft_ids=prompt[:2])

    assert parts
    assert not _draft_step(step).pictures


def cached(loop: EngineLoop, command: Generate) -> int:
    (answer,) = answer_all(loop, [command]).values()
    return answer.events[0].cached_tokens


def test_blocks_go_by_their_pictures(folder: Path) -> None:
    """Prompts that differ in a picture alone share what comes before it; no tenant finds another's."""
    loop = model_loop(folder, **PLAIN | {"prefix_caching": True})
    one, other = draw_picture(24, 32), draw_picture(24, 32, 1)
    first = ask(folder, "first", [one], start=10)
    full = (len(first.prompt_token_ids) - 1) // 4 * 4

    assert cached(loop, first) == 0
    assert cached(loop, replace(first, request_id="again")) == full
    assert cached(loop, ask(folder, "other picture", [other], start=10)) == 8
    assert cached(loop, replace(first, request_id="no picture", pictures=())) == 8
    assert cached(loop, replace(first, request_id="other tenant", tenant="b")) == 0
    assert cached(loop, ask(folder, "earlier", [one], start=9)) == 8


def test_tower_computes_a_picture_once(folder: Path) -> None:
    """However many chunks its tokens come in, and whatever else runs beside it; again where the engine has slept."""
    loop = model_loop(folder, **PLAIN | {"max_num_batched_tokens": 4, "max_num_seqs": 2})
    picture = draw_picture(32, 64)

    asked = [ask(folder, "a", [picture]), ask(folder, "b", [picture, draw_picture(24, 24)])]
    awake = answer_all(loop, asked)

    assert isinstance(loop.runner, Runner)
    assert loop.runner._pictures is not None
    assert loop.runner._pictures.num_computed == 2
    loop.runner.sleep()
    loop.runner.wake_up()
    again = answer_all(loop, [replace(command, request_id=f"{command.request_id} again") for command in asked])
    assert [reply.token_ids for reply in again.values()] == [reply.token_ids for reply in awake.values()]
    assert loop.runner._pictures.num_computed == 4


def test_blocks_of_another_engine_compose(each: Each) -> None:
    """An engine goes on with a prompt whose picture another one has seen."""
    folder, alone = each.folder, each.alone
    with contextlib.ExitStack() as stack:
        settings = PLAIN | {"prefix_caching": True, "num_kv_blocks": 256}
        prefiller = model_loop(folder, **settings, transfer=exchanging(stack))
        decoder = model_loop(folder, **settings, transfer=exchanging(stack))
        commands = [command for command in asked_of(folder) if command.n == 1]
        asked = [replace(command, remote=prefill(prefiller, command)) for command in commands]

        found = tokens_of(answer_all(decoder, asked[:2]))

        assert decoder.load().counters["kv_blocks_pulled"] > 0
    assert found == {key: alone[key] for key in (("one", 0), ("other words", 0))}


def test_pictures_come_over_http(folder: Path) -> None:
    """A reply over HTTP is that of a prompt with the picture's tokens in its place; a colour more is another prompt."""
    images = pytest.importorskip("PIL.Image")
    loop = model_loop(folder, **PLAIN | {"prefix_caching": True})

    def script(command: Command) -> list[tuple[Event, ...]]:
        events = [tuple(loop.handle(command))]
        while loop.has_work():
            events.append(tuple(loop.step()))
        return events

    def ask(http: httpx.Client, pixels: Tensor) -> Any:
        written = BytesIO()
        images.fromarray(pixels.numpy()).save(written, "PNG")
        image = {"url": f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"}
        parts = [
            {"type": "text", "text": "See "},
            {"type": "image_url", "image_url": image},
            {"type": "text", "text": "?"},
        ]
        said = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True, "max_tokens": 12}
        answer = http.post("/v1/chat/completions", json=CHAT | said | {"temperature": 0})
        assert answer.status_code == 200, answer.text
        return answer.json()

    one, other = draw_picture(32, 24), draw_picture(32, 24, 1)
    words = [token_ids("<user>See "), token_ids("?<assistant>")]
    prompt, placed = with_pictures(folder, words, [one])
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    (right,) = answer_all(model_loop(folder, **PLAIN), [Generate("1", prompt, greedy, pictures=placed)]).values()
    with (
        running_front(folder, FakeEngine(script, max_model_len=96)) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        answers = [ask(http, pixels) for pixels in (one, one, other)]
        modalities = http.get("/v1/models").json()["data"][0]["input_modalities"]

    assert [answer["choices"][0]["token_ids"] == right.token_ids for answer in answers] == [True, True, False]
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(prompt)}
    full = (len(prompt) - 1) // 4 * 4
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, full, len(words[0]) // 4 * 4]
    assert modalities == ["text", "image"]


@pytest.mark.soak
def test_ranks_see_the_same(each: Each) -> None:
    """Four processes: two halves of each layer, in two stages; the first stage has the tower."""
    loop = model_loop(each.folder, **each.busy, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert isinstance(loop.runner, Runner)
    try:
        assert tokens_of(answer_all(loop, asked_of(each.folder))) == each.alone
    finally:
        loop.runner.close()


@pytest.mark.parametrize("name", TINY_VISIONS)
def test_towers_compute_in_the_type_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """In bfloat16, as checkpoints are served, a picture has the vectors that it has in float32, rounded."""
    folder = write_tiny_vision(tmp_path, TINY_VISIONS[name])
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        read = load_pictures(engine_config(str(folder)), load_model_config(folder), CPU, dtype)
        assert read is not None
        found[dtype] = read.tower(draw_tokens(folder, 3, 4))

    exact, rounded = found.values()
    assert rounded.dtype is torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()


def test_stage_without_the_layers_that_pictures_go_into_is_refused(tmp_path: Path) -> None:
    """A Qwen3-VL's picture is added behind the first two: a stage that has one of them has no room for it."""
    folder = write_tiny_vision(tmp_path, TINY_VISIONS["Qwen3-VL"])
    part = stage_of(load_model_config(folder), 0, 3)

    with pytest.raises(UnsupportedModel, match="first 2 layers, of which the first stage has 1"):
        load_pictures(engine_config(str(folder)), part, CPU, torch.float32)


def test_tower_is_loaded_where_pictures_are_read(folder: Path, tmp_path: Path) -> None:
    """Not where the operator takes none, and not of a tower that is not known here: the text is served all the same."""
    assert (
        load_pictures(engine_config(str(folder), max_images=0), load_model_config(folder), CPU, torch.float32) is None
    )
    clip = TinyVision(architecture="LlavaForConditionalGeneration", extra={"model_type": "clip_vision_model"})
    assert load_vision_config(write_tiny_vision(tmp_path / "clip", clip)) is None
    assert load_vision_config(write_tiny_model(tmp_path / "text")) is None


def test_tower_that_cannot_be_computed_is_refused() -> None:
    """By what its config says, before any weight is read."""
    config = TINY_VISIONS["Mistral 3"].config()

    with pytest.raises(UnsupportedModel, match="hidden_act of the vision tower is 'relu'; supported: gelu"):
        vision_config(config | {"vision_config": config["vision_config"] | {"hidden_act": "relu"}})
    with pytest.raises(UnsupportedModel, match="patch_size = 'large'"):
        vision_config(config | {"vision_config": config["vision_config"] | {"patch_size": "large"}})
    with pytest.raises(UnsupportedModel, match="hidden_size = 30, of which each of 3 heads"):
        sizes = {"hidden_size": 30, "num_attention_heads": 3}
        vision_config(config | {"vision_config": config["vision_config"] | sizes})


def test_processor_says_how_large_pictures_come(folder: Path) -> None:
    """Its longest side and its colours' means stand in files of their own; a picture is cut into rows of tokens."""
    config = TINY_VISIONS["Mistral 3"].config()
    vision = vision_config(config, {"size": {"longest_edge": 1540}, "image_mean": [0.5, 0.5, 0.5]})

    assert isinstance(vision, PixtralConfig)
    assert (vision.longest_side, vision.mean) == (1540, (0.5, 0.5, 0.5))
    assert vision.grid(8, 8) == (1, 1)
    assert vision.grid(9, 16) == (2, 2)
    assert vision.grid(1, 10_000) == (1540 // 8 + 1, 1)
