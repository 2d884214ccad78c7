# Decodes from graphs, where there is no CUDA: which graph is captured and replayed when, and that what is replayed over
# fixed buffers says, token for token, what is computed without.

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_backend.execution import device_state as state_module
from gpu_backend.execution import device_step as device_step_module
from gpu_backend.execution import graphs as graphs_module
from gpu_backend.execution.device_state import NO_BLOCK, DeviceState
from gpu_backend.execution.graph_sizes import (
    LEAST_REACH,
    GraphSizes,
    Size,
    draws_plainly,
    is_decode,
    reach_of,
    sizes_up_to,
)
from gpu_backend.execution.graphs import STEPS_BETWEEN, USES_BEFORE, DecodeGraphs
from gpu_backend.execution.runner import Runner
from gpu_backend.hardware.calibration import measure_step_cost
from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.kernels.layout.upload import pinned, upload
from gpu_backend.sampling.sampler import Sampled, draw, sample, sampling_tensors_of
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import UNKNOWN, Launched, SequenceStep, StepPlan, StepResult
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.support.engine import Answer, answer_all, draft_from, drafts_in, expect_short_replies, greedy, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen"), TinyModel("Qwen3ForCausalLM", head_dim=24))


def graphs_of(runner: object) -> DecodeGraphs:
    """Return the graphs that a runner captures."""
    assert isinstance(runner, Runner) and runner.graphs is not None
    return runner.graphs


def test_sizes_are_few_and_reach_the_most() -> None:
    """Small batches have graphs of their own, larger ones share one with their neighbours."""
    assert sizes_up_to(256)[:6] == (1, 2, 4, 8, 16, 24) and sizes_up_to(256)[-2:] == (248, 256)
    assert sizes_up_to(9) == (1, 2, 4, 8, 9)
    assert sizes_up_to(1024)[-25:-22] == (256, 288, 320) and len(sizes_up_to(1024)) == 59
    assert sizes_up_to(1) == (1,)


@pytest.mark.parametrize("max_model_len", [2048, 40_960, 131_072])
def test_attention_is_cut_by_the_contexts_that_there_are(max_model_len: int) -> None:
    """Not by the longest that there could be: a batch launches as many programs whatever a model's context."""
    layouts = PagedLayouts(16, heads=32, kv_heads=8, device=CPU, processors=132)
    sizes = GraphSizes(256, 0, layouts, max_model_len)
    expected = {600: [8, 4, 1, 1], 2000: [8, 4, 1, 1]}
    expected |= {} if max_model_len == 2048 else {8000: [32, 4, 1, 1], 30_000: [32, 4, 4, 4]}
    found = {length: [sizes.at(count, longest=length).splits for count in (1, 8, 64, 256)] for length in expected}
    step = SequenceStep(0, (5,), max_model_len - 1, (0,), True, SamplingParams(9), 0)

    assert found == expected
    assert sizes.at(256, longest=max_model_len).splits == max(1, max_model_len // 8192 // 4 * 4)
    assert sizes.fitting(StepPlan(1, (step,))) == sizes.at(1, longest=max_model_len)
    assert len({reach_of(length) for length in range(1, 131_073, 100)}) == 4  # graphs of one size, at the most


def test_a_reply_goes_on_to_a_graph_for_longer_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what it says without graphs; until there is one for its length, the last one serves it."""
    monkeypatch.setattr(ops, "num_processors", lambda device: 132)
    folder = write_tiny_model(tmp_path, TinyModel("Qwen3ForCausalLM", max_position=4096))
    command = greedy("long", [token % 250 for token in range(LEAST_REACH - 20)], 50)
    expected = answer_all(model_loop(folder), [command])
    loop = model_loop(folder, cuda_graphs=True)

    assert answer_all(loop, [command])["long", 0].token_ids == expected["long", 0].token_ids
    assert sorted(graphs_of(loop.runner)._graphs) == [Size(1, 1, 8), Size(1, 1, 16)]


def test_decodes_are_measured_as_they_are_replayed(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is captured before it is measured: what a step takes is told of graphs where graphs will compute it."""
    runner = model_loop(qwen, max_num_seqs=32, max_num_batched_tokens=64, cuda_graphs=True).runner
    assert isinstance(runner, Runner)
    graphs, measured = graphs_of(runner), []

    def run(plan: StepPlan) -> StepResult:
        result = runner.run(plan)
        measured.append((plan, graphs.find(plan) in graphs._graphs))
        return result

    measure_step_cost(run, 30, runner.block_size, 32, 64)

    assert {len(plan.sequences) for plan, _ in measured} == {1, 2, 8, 32}
    assert [is_replayed for plan, is_replayed in measured] == [is_decode(plan) for plan, _ in measured]


@pytest.mark.parametrize(
    ("overlaps", "num_kv_blocks"),
    [(False, 200), (True, 20), *(pytest.param(*rest, marks=pytest.mark.soak) for rest in ((False, 20), (True, 200)))],
)
def test_replayed_replies_equal_computed_ones(qwen: Path, overlaps: bool, num_kv_blocks: int) -> None:
    """Greedy, sampled, filtered and scored, crowded, preempted, with leftovers of others in every block.

    The last of them, which ask for nothing that a graph cannot draw, run alone at the end.
    """
    plain = SamplingParams(max_tokens=40, temperature=0.9)
    wishes = (plain, replace(plain, temperature=0.0), replace(plain, top_p=0.7), replace(plain, logprobs=1),
              replace(plain, presence_penalty=1.0), replace(plain, stop_token_ids=frozenset(range(30))))  # fmt: skip
    commands = [
        Generate(str(i), tuple(range(7 * i, 11 * i + 3)), replace(wishes[i % len(wishes)], seed=i)) for i in range(18)
    ]
    commands += [replace(commands[i], request_id=f"plain {i}") for i in (0, 1, 2, 6, 7, 8)]
    answers: list[dict[tuple[str, int], Answer]] = []
    for cuda_graphs in (False, True):
        loop = model_loop(
            qwen, max_num_seqs=7, max_num_batched_tokens=40, num_kv_blocks=num_kv_blocks, max_model_len=300,
            cuda_graphs=cuda_graphs, async_scheduling=overlaps,
        )  # fmt: skip
        with torch.inference_mode():
            loop.runner.kv_cache[:, :num_kv_blocks] = float("nan")  # type: ignore[attr-defined]
        expect_short_replies(loop)
        answers.append(answer_all(loop, commands))
        assert (loop.scheduler.running.num_preempted > 0) == (num_kv_blocks == 20)

    computed, replayed = answers
    assert len(graphs_of(loop.runner)._graphs) >= 2
    assert {k: a.token_ids for k, a in replayed.items()} == {k: a.token_ids for k, a in computed.items()}
    assert {k: a.finish_reason for k, a in replayed.items()} == {k: a.finish_reason for k, a in computed.items()}


@pytest.mark.parametrize("overlaps", [False, True])
def test_penalised_rows_are_drawn_by_a_graph(qwen: Path, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most rows are penalised, as by a checkpoint's own generation_config, none is sampled outside of a graph but
    one with log-probabilities; all say what they say without graphs.
    """
    usual = SamplingParams(max_tokens=40, temperature=0.9, repetition_penalty=1.3)
    wishes = (usual, replace(usual, frequency_penalty=0.7, top_p=0.8), replace(usual, presence_penalty=1.5, top_k=9),
              replace(usual, repetition_penalty=1.0), replace(usual, logprobs=1))  # fmt: skip
    commands = [Generate(str(i), tuple(range(9 * i, 9 * i + 8)), replace(w, seed=i)) for i, w in enumerate(wishes)]
    expected = answer_all(model_loop(qwen, max_num_seqs=5), commands)
    loop = model_loop(qwen, max_num_seqs=5, cuda_graphs=True, async_scheduling=overlaps)
    graphs_of(loop.runner).capture(Size(5, 1))
    sampled: list[int] = []

    def count(logits: torch.Tensor, *args: Any) -> Sampled:
        sampled.append(len(logits))
        return sample(logits, *args)

    monkeypatch.setattr(device_step_module, "sample", count)
    found = answer_all(loop, commands)

    assert {k: a.token_ids for k, a in found.items()} == {k: a.token_ids for k, a in expected.items()}
    assert sampled == [5] + [1] * 39  # the prompts' step, then the one that is reported
    assert graphs_of(loop.runner)._penalised.keys() == {Size(5, 1)}


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_row_that_asks_for_more_leaves_the_others_to_their_graph(
    qwen: Path, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone is sampled by itself, be it penalised, reported or held to a grammar; all say what they say without."""
    plain = SamplingParams(max_tokens=40, temperature=0.9)
    asks = (
        replace(plain, repetition_penalty=1.3),
        replace(plain, logprobs=2),
        replace(plain, grammar=Grammar(GrammarKind.REGEX, "[a-f ]+")),
    )
    commands = [Generate(str(i), tuple(range(9 * i, 9 * i + 8)), replace(plain, seed=i)) for i in range(4)]
    batches = [[*commands, Generate("asks", tuple(range(20)), ask)] for ask in asks]
    expected = [answer_all(model_loop(qwen, max_num_seqs=5), batch) for batch in batches]
    loop = model_loop(qwen, max_num_seqs=5, cuda_graphs=True, async_scheduling=overlaps)
    graphs_of(loop.runner).capture(Size(5, 1))
    sampled: list[int] = []

    def count(logits: torch.Tensor, *args: Any) -> Sampled:
        sampled.append(len(logits))
        return sample(logits, *args)

    monkeypatch.setattr(device_step_module, "sample", count)
    answers = [answer_all(loop, batch) for batch in batches]

    for found, computed in zip(answers, expected, strict=True):
        assert {k: a.token_ids for k, a in found.items()} == {k: a.token_ids for k, a in computed.items()}
    reports = [
        [logprob for event in told["asks", 0].events for logprob in event.logprobs]
        for told in (answers[1], expected[1])
    ]
    assert [len(report.top) for report in reports[0] if report is not None] == [2] * 40 and sampled.count(1) >= 78
    for ours, theirs in zip(*reports, strict=True):
        assert ours is not None and theirs is not None and ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert sampled.count(5) <= 3  # the prompts' steps


def test_first_token_never_waits_for_a_capture(qwen: Path) -> None:
    """A graph is captured when its size came up often, in a step without a prompt, and long after the last capture."""
    loop = model_loop(qwen, max_num_seqs=8, cuda_graphs=True)
    assert isinstance(loop.runner, Runner)
    graphs, captures, steps = graphs_of(loop.runner), [], []
    record, launch = graphs._graph_capture.capture, loop.runner.launch

    def note(act: Callable[[], None]) -> Callable[[], None]:
        captures.append(len(steps))
        return record(act)

    def count(plan: StepPlan) -> object:
        steps.append(plan)
        return launch(plan)

    graphs._graph_capture.capture = note  # type: ignore[method-assign]
    loop.runner.launch = count  # type: ignore[method-assign, assignment]
    answer_all(loop, [greedy("first", range(20), 30), greedy("second", range(40, 60), 60)])

    assert captures[0] > USES_BEFORE + 1  # the prompts' step and some decodes came before
    when = sorted(set(captures))
    assert len(captures) == 2 * len(when) == 4  # of the model and of the drawing, for two sequences and for one
    assert when[1] - when[0] > STEPS_BETWEEN
    assert all(len(plan.sequences[0].token_ids) == 1 for plan in (steps[at - 1] for at in when))


def test_device_gets_a_step_before_the_last_is_read_and_little_to_know(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step N + 1 is launched before the tokens of step N are read; what it is told of a sequence are seven numbers.

    They are its row, how far it is, that it computes one token and knows one, which block is new and where, and that
    the table has the token; only newcomers and who needs several blocks at once bring more.
    """
    loop = model_loop(qwen, max_num_seqs=4, cuda_graphs=True, async_scheduling=True)
    assert isinstance(loop.runner, Runner)
    graphs_of(loop.runner).capture(Size(2, 1))
    order: list[tuple[str, int]] = []
    sent: list[list[int]] = []
    launch = loop.runner.launch

    class Noted:
        def __init__(self, step: int, launched: Launched) -> None:
            self.step, self.launched, self.sample = step, launched, launched.sample

        def result(self) -> StepResult:
            order.append(("read", self.step))
            return self.launched.result()

    def note(plan: StepPlan) -> Launched:
        order.append(("launch", plan.step))
        sent.append([])
        return Noted(plan.step, launch(plan))

    def counting(send: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def count(values: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
            tensor = send(values, device, dtype)
            sent[-1].append(tensor.numel())
            return tensor

        return count

    monkeypatch.setattr(graphs_module, "upload", counting(upload))
    monkeypatch.setattr(graphs_module, "pinned", counting(pinned))
    monkeypatch.setattr(state_module, "upload", counting(upload))
    monkeypatch.setattr(loop.runner, "launch", note)
    answers = answer_all(loop, [greedy("a", range(20), 30), greedy("b", range(40, 60), 30)])

    assert all(len(answer.token_ids) == 30 for answer in answers.values())
    steps = [step for what, step in order if what == "launch"]
    assert [step for what, step in order if what == "read"] == steps and len(steps) == 30
    for step in steps[:-1]:
        assert order.index(("launch", step + 1)) < order.index(("read", step))
    assert sent[1] == [2 * 2 * 3, 2, 2 * 3, 2 * 3, 2 * 7]  # two blocks each, and how they draw
    assert sorted(map(len, sent[2:])) == [1] * 26 + [2] * 2  # what plain torch clears of a new block, too
    assert all(uploads[0] == 2 * 7 for uploads in sent[2:])


def test_no_request_fails_for_want_of_a_graph(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture that fails is told of once; decodes go on without graphs, and say the same."""
    commands = [greedy(str(i), range(9 * i, 9 * i + 8), 30) for i in range(3)]
    expected = answer_all(model_loop(qwen, max_num_seqs=3), commands)
    loop = model_loop(qwen, max_num_seqs=3, cuda_graphs=True)
    graphs, tried = graphs_of(loop.runner), []

    def fail(act: Callable[[], None]) -> Callable[[], None]:
        tried.append(act)
        raise RuntimeError("out of memory")

    graphs._graph_capture.capture = fail  # type: ignore[method-assign]
    answers = answer_all(loop, commands)

    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}
    assert len(tried) == 1 and capsys.readouterr().err.count("out of memory") == 1


class TwoRanks:
    """A rank beside another one, which computes what this one does until it fails at its ``last`` question."""

    rank = 0

    def __init__(self, graphs: DecodeGraphs, last: int) -> None:
        self.last = last
        self.told: list[tuple[bool, int]] = []  # whether this rank could, and how many graphs it had
        self.meetings = 0  # with the other one, where it would wait for it
        self._graphs = graphs
        self._is_apart = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._is_apart = True
        yield
        self._is_apart = False

    def share(self, tensor: torch.Tensor) -> None:
        self.meetings += not self._is_apart

    def least(self, mine: int) -> int:
        self.told.append((bool(mine), len(self._graphs._graphs)))
        return 0 if len(self.told) >= self.last else mine


@pytest.mark.parametrize("last", [3, 4])
def test_ranks_replay_a_graph_together_or_not_at_all(qwen: Path, last: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Where another rank could not capture one, ours is thrown away: NCCL waits for ranks that do not replay.

    Nor is anything begun together before each knows that all can.
    """
    loop = model_loop(qwen, num_kv_blocks=60, cuda_graphs=True)
    graphs = graphs_of(loop.runner)
    graphs._ranks = ranks = TwoRanks(graphs, last)  # type: ignore[assignment]
    commands = [greedy(str(i), range(3 + i), 60) for i in range(2)]
    answers = answer_all(loop, commands[:1])
    before = ranks.meetings
    answers |= answer_all(loop, commands)

    assert ranks.told == [(True, 0), (True, 1), (True, 1), (True, 2)][:last]
    assert list(graphs._graphs) == [Size(1, 1)] and "another rank" in capsys.readouterr().err
    assert before > 0
    assert [len(answer.token_ids) for answer in answers.values()] == [60, 60]


def test_smaller_batches_borrow_a_larger_graph_until_they_have_one(qwen: Path) -> None:
    """At most half of the places are padding; what has a prompt in it is never replayed."""
    loop = model_loop(qwen, max_num_seqs=8, cuda_graphs=True, speculative_method="ngram", num_speculative_tokens=3)
    graphs = graphs_of(loop.runner)
    for size in (Size(8, 1), Size(4, 4)):
        graphs.capture(size)
    graphs._steps_since = -1000

    def found(count: int, **changes: object) -> Size | None:
        steps = [
            replace(SequenceStep(i, (5,), 3, (0,), True, SamplingParams(9), 0, row=i), **changes) for i in range(count)
        ]
        return graphs.find(StepPlan(1, tuple(steps)))

    assert [found(count) for count in (1, 2, 3, 4, 5, 8)] == [None, None, None, *[Size(8, 1)] * 3]
    assert found(3, token_ids=(5, 6), num_draft_tokens=1) == Size(4, 4)
    assert found(3, token_ids=(5, 6), num_draft_tokens=1, start=1) is None  # no four tokens are there yet
    assert found(5, samples=False) is None
    assert found(5, token_ids=(5, 6)) is None
    assert graphs.find(StepPlan(1, ())) is None


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_drafts_are_verified_in_graphs(qwen: Path, share: float) -> None:
    """Sequences with drafts and without, as many as there were or fewer, say what they say without any."""
    wishes = (SamplingParams(40, temperature=0.8), SamplingParams(40, temperature=0.0), SamplingParams(40, top_p=0.8))
    commands = [Generate(str(i), tuple(range(9 * i, 9 * i + 8)), replace(wishes[i % 3], seed=i)) for i in range(6)]
    expected = answer_all(model_loop(qwen, max_num_seqs=3), commands)
    loop = model_loop(
        qwen, max_num_seqs=3, cuda_graphs=True, speculative_method="ngram", num_speculative_tokens=3,
        step_cost=StepCost(fixed=1.0, weights=0.0, token=0.0, context=0.0, pair=0.0),
    )  # fmt: skip
    draft_from(loop, {key: answer.token_ids for key, answer in expected.items()}, share)

    answers = answer_all(loop, commands)

    assert any(size.width == 4 for size in graphs_of(loop.runner)._graphs)
    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}
    assert loop.load().counters["accepted_tokens"] > (100 if share == 1 else 20)


def test_drafts_of_a_draft_model_follow_each_other_on_the_device(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows none of them before the last is launched, from a graph, unless one follows from penalties."""
    plain, penalised = SamplingParams(60, temperature=0.8), SamplingParams(20, presence_penalty=0.5)
    commands = [Generate(str(i), tuple(range(9 * i, 9 * i + 8)), replace(plain, seed=i)) for i in range(3)]
    last = Generate("penalised", tuple(range(8)), penalised)
    expected = answer_all(model_loop(qwen), [*commands, last])
    loop = model_loop(
        qwen, max_num_seqs=3, cuda_graphs=True, num_speculative_tokens=3,
        speculative_method="draft", speculative_model=str(qwen),
        step_cost=StepCost(fixed=1.0, weights=0.0, token=0.0, context=0.0, pair=0.0),
    )  # fmt: skip
    assert isinstance(loop.runner, Runner) and loop.runner._draft_model is not None
    draft_model, passes = loop.runner._draft_model, []
    compute = draft_model._compute

    def note(steps: list[SequenceStep]) -> Any:
        passes.append([step.token_ids for step in steps])
        return compute(steps)

    monkeypatch.setattr(draft_model, "_compute", note)
    answers = answer_all(loop, commands)
    followed = [tokens for steps in passes for tokens in steps if len(tokens) == 1]
    passes.clear()
    answers |= answer_all(loop, [last])

    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}
    assert followed and set(followed) == {(UNKNOWN,)}
    assert passes and not any(UNKNOWN in tokens for steps in passes for tokens in steps)
    assert draft_model.graphs is not None
    assert {size.width for size in draft_model.graphs._graphs} == {1, 2}
    counters = loop.load().counters
    assert counters["accepted_tokens"] > 0.9 * counters["draft_tokens"] > 50


def test_graphs_of_a_draft_model_draft_what_its_passes_do(qwen: Path, tmp_path: Path) -> None:
    """Where it lacks two tokens, what it thinks of the first of them does not count: the second is known."""
    draft = tmp_path / "draft"
    shutil.copytree(qwen, draft)
    for file in draft.glob("*.safetensors"):
        dice = torch.Generator().manual_seed(1)
        weights = load_file(file)
        noisy = {name: w * (1 + 0.06 * torch.randn(w.shape, generator=dice)).to(w) for name, w in weights.items()}
        save_file(noisy, file)
    plain = SamplingParams(50, temperature=0.6)
    commands = [Generate(str(i), tuple(range(9 * i, 9 * i + 8)), replace(plain, seed=i)) for i in range(3)]
    drafts: list[list[tuple[int, ...]]] = []
    for cuda_graphs in (False, True):
        loop = model_loop(
            qwen, max_num_seqs=3, cuda_graphs=cuda_graphs, num_speculative_tokens=2, speculative_method="draft",
            speculative_model=str(draft),
        )  # fmt: skip
        assert isinstance(loop.runner, Runner) and loop.runner._draft_model is not None
        complete, made = loop.runner._draft_model.complete, []

        def note(plan: StepPlan, complete: Any = complete, made: Any = made, loop: Any = loop) -> StepPlan:
            plan = complete(plan)
            made += [step.token_ids[:1] + drafts_in(loop, step) for step in plan.sequences if step.num_draft_tokens]
            return plan

        loop.runner._draft_model.complete = note  # type: ignore[method-assign]
        answer_all(loop, commands)
        drafts.append(made)
        counters = loop.load().counters

    assert drafts[0] == drafts[1]
    assert 0.2 < counters["accepted_tokens"] / counters["draft_tokens"] < 0.9


def test_what_looks_at_more_than_logits_is_not_drawn_in_the_graph() -> None:
    """Temperature, filters and seed are in the table; scores, penalties, biases and least lengths are not."""
    step = SequenceStep(1, (5,), 3, (0,), True, SamplingParams(9, temperature=0.7, seed=3), 0, num_prompt=3)
    plain = ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1})
    others = ({"logprobs": 0}, {"min_tokens": 9}, {"logit_bias": ((1, 2.0),)}, {"presence_penalty": 0.1},
              {"repetition_penalty": 2.0})  # fmt: skip

    assert draws_plainly(step)
    for wish in plain:
        assert draws_plainly(replace(step, sampling=replace(step.sampling, **wish))), wish  # type: ignore[arg-type]
    for other in others:
        assert not draws_plainly(replace(step, sampling=replace(step.sampling, **other))), other  # type: ignore[arg-type]


def test_draws_by_the_table_equal_draws_by_the_list() -> None:
    """Every filter, alone and together, at every temperature, keeps the same tokens and draws the same one."""
    dice = random.Random(5)
    logits = torch.randn(400, 120, generator=torch.Generator().manual_seed(5)) * 3
    steps = [
        SequenceStep(
            i, (5,), dice.randrange(99), (0,), True,
            SamplingParams(
                9, dice.choice((0.0, 0.3, 1.0, 2.0)), dice.choice((1.0, 0.9, 0.3)), dice.choice((0, 1, 7, 500)),
                dice.choice((0.0, 0.05, 0.5)), seed=dice.getrandbits(64),
            ),
            dice.randrange(3),
        )
        for i in range(len(logits))
    ]  # fmt: skip

    drawn, usable = draw(logits, sampling_tensors_of(steps, CPU))

    assert torch.equal(drawn, sample(logits.clone(), steps).token_ids)
    assert len(drawn.unique()) > 50 and bool(usable.all())


def test_table_learns_what_has_changed_and_no_more() -> None:
    """One new block goes with the step's other numbers; a row's new owner brings its blocks and its dice."""
    table = DeviceState(3, 4, spare_block=9, device=CPU)
    step = SequenceStep(7, (5,), 3, (2, 4), True, SamplingParams(9, temperature=0.5, seed=2**63 + 6), 3, row=1)
    known = table.on_device

    left = [table.update([step]), table.update([replace(step, block_table=(2, 4, 8))])]
    first = known.block_tables[1].tolist()
    seed = known.numbers[1, 0].item()
    left.append(table.update([replace(step, block_table=(2, 4, 8))]))
    table.update([replace(step, sequence_id=8, block_table=(6,), sampling=SamplingParams(9, top_k=5, seed=1))])
    left.append(table.update([replace(step, sequence_id=8, block_table=(3, 6), sampling=SamplingParams(9))]))

    assert left == [[NO_BLOCK], [(2, 8)], [NO_BLOCK], [NO_BLOCK]]  # the last was computed again elsewhere
    assert first == [2, 4, 9, 9] and seed == 6 - 2**63
    assert known.block_tables[1, :2].tolist() == [3, 6]
    assert known.numbers[1].tolist() == [1, 3, 5] and known.shares[[1, 3], 0].tolist() == [1.0, 1.0]
    assert known.block_tables[3].tolist() == [9] * 4
