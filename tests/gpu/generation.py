# The engine on the device against a plain forward pass, on tiny random models: alone, crowded, cached, preempted,
# aborted. A reply is judged token by token with one pass over prompt and reply: each token must be the likeliest there,
# as far as the precision can tell. How far that is, the same pass says when it is computed in that precision.

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import engine_config
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Abort, Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, require
from tests.gpu.plain import PlainModel
from tests.support.engine import answer_all, collect, expect_short_replies, finish, greedy
from tests.support.tiny_model import TinyModel, write_tiny_model

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 70, 131)
MAX_TOKENS = 12
# A chosen token's regret is how far its logit lies below the likeliest's. Two logits that are each off by the noise of
# the precision differ by up to twice that; on average almost every choice is right.
MOST_REGRET = 2.0  # of the largest noise seen
MEAN_REGRET = 0.2  # of the mean noise
A_TIE = 1e-4


class ModelUnderTest:
    """A tiny checkpoint in a folder, the plain pass over it, and engines that serve it on the device."""

    def __init__(self, setting: Setting, folder: Path, model: TinyModel) -> None:
        self.setting = setting
        self.folder = write_tiny_model(folder / model.architecture, model)
        self.plain = PlainModel(self.folder, setting.dtype)
        self.noisy = PlainModel(self.folder, setting.dtype, setting.dtype)
        self.prompts = [tuple(setting.dice.randrange(256) for _ in range(length)) for length in LENGTHS]
        self.regrets: list[float] = []
        self.noises: list[float] = []

    def engine(self, **settings: Any) -> EngineLoop:
        """Build an engine on the device; ``settings`` go to ``EngineConfig``."""
        dtype = str(self.setting.dtype).removeprefix("torch.")
        settings = {"num_kv_blocks": 200, "max_num_seqs": 9} | settings
        config = engine_config(model=str(self.folder), device=self.setting.device.type, dtype=dtype, **settings)
        model = load_model_config(self.folder)
        runner = Runner(config, model)
        return EngineLoop(config, runner, runner.num_blocks, Limits(runner.max_model_len, model.vocab_size))

    def judge(self, prompt: Sequence[int], reply: list[int], length: int = MAX_TOKENS) -> None:
        """Hold a greedy reply against the plain pass; ``settle`` says whether all of them were right."""
        require(len(reply) == length, f"a reply has {len(reply)} tokens, not {length}")
        context = [*prompt, *reply[:-1]]
        logits, noisy = (model.logits(context)[len(prompt) - 1 :].double() for model in (self.plain, self.noisy))
        chosen = logits.gather(-1, torch.tensor(reply)[:, None])[:, 0]
        self.regrets += (logits.amax(-1) - chosen).tolist()
        self.noises += (noisy - logits).abs().amax(-1).tolist()

    def settle(self) -> None:
        """Compare all regrets with all noise: one reply alone has too few tokens to know its noise by."""
        worst, most = max(self.regrets), max(A_TIE, MOST_REGRET * max(self.noises))
        require(worst <= most, f"a token lies {worst:.3g} below the likeliest, more than {most:.3g}")
        mean, allowed = fmean(self.regrets), max(A_TIE, MEAN_REGRET * fmean(self.noises))
        require(mean <= allowed, f"tokens lie {mean:.3g} below the likeliest on average, more than {allowed:.3g}")

    def judge_all(self, loop: EngineLoop, length: int = MAX_TOKENS) -> None:
        """Give an engine all prompts at once, and judge every reply."""
        answers = answer_all(loop, [greedy(str(i), prompt, length) for i, prompt in enumerate(self.prompts)])
        for i, prompt in enumerate(self.prompts):
            self.judge(prompt, answers[str(i), 0].token_ids, length)


def _on_both(setting: Setting, act: Any) -> str:
    """Do it with a fresh Llama and a fresh Qwen3."""
    worst, tokens = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for architecture, dim in (("LlamaForCausalLM", 16), ("Qwen3ForCausalLM", 24)):
            seed = setting.dice.getrandbits(31)
            tested = ModelUnderTest(setting, Path(folder), TinyModel(architecture, head_dim=dim, seed=seed))
            act(tested)
            tested.settle()
            worst, tokens = max(worst, *tested.regrets), tokens + len(tested.regrets)
    return f"{tokens} tokens, worst {worst:.1e} below the likeliest"


def _alone_and_again(tested: ModelUnderTest) -> None:
    loop = tested.engine()
    for prompt in tested.prompts:
        tested.judge(prompt, answer_all(loop, [greedy("x", prompt, MAX_TOKENS)])["x", 0].token_ids)
        again = answer_all(loop, [greedy("x", prompt, MAX_TOKENS)])["x", 0]
        tested.judge(prompt, again.token_ids)
        found, expected = again.events[0].cached_tokens, (len(prompt) - 1) // 16 * 16
        require(found == expected, f"{found} prompt tokens were found in the cache, not {expected}")


def _crowded(tested: ModelUnderTest) -> None:
    tested.judge_all(tested.engine(max_num_batched_tokens=24))


def _preempted(tested: ModelUnderTest) -> None:
    loop = tested.engine(max_num_batched_tokens=40, num_kv_blocks=13)
    expect_short_replies(loop)
    tested.judge_all(loop, 40)
    require(loop.scheduler.running.num_preempted > 0, "no sequence was preempted")


def _aborted(tested: ModelUnderTest) -> None:
    loop = tested.engine(max_num_batched_tokens=24)
    for i, prompt in enumerate(tested.prompts):
        loop.handle(greedy(str(i), prompt, 50))
    answers: dict[Any, Any] = {}
    for _ in range(tested.setting.dice.randint(1, 30)):
        collect(answers, loop.step())
    for i in range(len(tested.prompts)):
        collect(answers, loop.handle(Abort(str(i))))
        loop.scheduler.check()
    require(loop.blocks.num_in_use == 0, f"{loop.blocks.num_in_use} blocks are still held")
    finish(loop, answers)
    tested.judge_all(loop)


def seeded_replies(setting: Setting) -> str:
    """A sampled reply is the same alone and in a crowd that preempts it."""
    replies = 0
    with tempfile.TemporaryDirectory() as folder:
        tested = ModelUnderTest(setting, Path(folder), TinyModel(seed=setting.dice.getrandbits(31)))
        dice = random.Random(setting.dice.getrandbits(62))
        sampling = [SamplingParams(30, 1.0, 0.95, 50, 0.01, seed=dice.getrandbits(63)) for _ in range(6)]
        commands = [Generate(str(i), tested.prompts[i], wish, n=2) for i, wish in enumerate(sampling)]
        crowded = answer_all(tested.engine(max_num_batched_tokens=24, num_kv_blocks=20), commands)
        roomy = tested.engine()
        for command in commands:
            for key, answer in answer_all(roomy, [command]).items():
                require(crowded[key].token_ids == answer.token_ids, f"reply {key} differs in company")
                replies += 1
    return f"{replies} replies of 30 tokens equal"


# That every one of them fails for an engine which loses something is shown in this precision, too.
COARSE = (torch.bfloat16,)
BOTH = (*COARSE, torch.float32)
CHECKS = (
    Check("engine equals a plain pass, alone and from the cache", lambda s: _on_both(s, _alone_and_again), long=BOTH),
    Check("engine equals a plain pass, crowded and in chunks", lambda s: _on_both(s, _crowded), long=COARSE),
    Check("engine equals a plain pass, preempted", lambda s: _on_both(s, _preempted), long=BOTH),
    Check("abort frees every block, and the next replies are right", lambda s: _on_both(s, _aborted), long=COARSE),
    Check("seeded replies do not depend on their company", seeded_replies, (torch.float32,)),
)
