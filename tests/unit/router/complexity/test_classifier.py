# The complexity model: what it reads, that the served weights score as scikit-learn does, and what it refuses.

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from gateway.scoring.score_lines import score_complexity
from protocol.chat import ChatRequest, ImagePart, ImageUrl, Message, TextPart
from protocol.completions import CompletionRequest
from router.catalog.errors import ArtifactMismatch
from router.complexity.classifier import MANIFEST, WEIGHTS, Complexity, _in_float64
from router.complexity.features import HEAD, TAIL, read_text, text_of
from router.complexity.text_stats import STATS_NAMES
from tests.unit.router.examples import chat
from tools.complexity_training.dataset import Outcomes, outcomes_of

if TYPE_CHECKING:  # scikit-learn takes a second, which only the process that runs these tests should spend
    from tools.complexity_training.fit import FittedComplexity

ARTIFACTS = Path(__file__).parents[4] / "router" / "complexity" / "artifacts"


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Some hundred short prompts in which sums are hard for the weak model."""
    dice = random.Random(3)
    prompts, strong, weak = [], [], []
    for _ in range(300):
        is_sum = dice.random() < 0.5
        words = dice.choices(("river", "Ärger", "law", "cat", "why?"), k=dice.randint(1, 30))
        prompts.append(f"{dice.randint(1, 99)} + {dice.randint(1, 99)} = " * is_sum + " ".join(words))
        strong.append(float(dice.random() < 0.9))
        weak.append(float(dice.random() < (0.3 if is_sum else 0.8)))
    kinds = np.array(["sum" if "+" in prompt else "words" for prompt in prompts])
    return outcomes_of(prompts, kinds, kinds, np.array(strong), np.array(weak), kinds)


@pytest.fixture(scope="module")
def fitted(outcomes: Outcomes) -> FittedComplexity:
    from tools.complexity_training.fit import FittedComplexity

    with threadpool_limits(1):  # beside other tests, threads that wait for each other are slower than one
        return FittedComplexity().fit(outcomes)


def test_served_weights_score_as_the_fitted_model(outcomes: Outcomes, fitted: FittedComplexity, tmp_path: Path) -> None:
    """What is served from exported weights equals what scikit-learn says, to the precision of the weights."""
    from tools.complexity_training.fit import export

    export(fitted, tmp_path, {})
    served = Complexity.load(tmp_path)
    odd = ["?", "größer 字 😀 \ud800", "x" * 50_000, "word " * 20_000, "Which?\nA. one\n B) two\nAnswer:"]
    prompts = [*outcomes.prompts, *odd]
    zeros, words = np.zeros(len(prompts)), np.array([""] * len(prompts))

    scores = [served.small_suffices(chat(text=prompt)) for prompt in prompts]

    assert np.allclose(scores, fitted.scores(outcomes_of(prompts, words, words, zeros, zeros, words)), atol=1e-5)
    assert min(scores) < 0.5 < max(scores)


def test_what_cannot_be_read_is_as_likely_as_anything(outcomes: Outcomes, fitted: FittedComplexity) -> None:
    """Of a picture, token ids or nothing the model says how often a small one suffices at all, and no more."""
    served = Complexity({name: np.asarray(array) for name, array in fitted.weights().items()})
    picture = ImagePart(ImageUrl(url="data:image/png;base64,AAAA"))
    unread = (
        chat(text=""),
        chat(text=" \n"),
        ChatRequest(model="auto", messages=(Message(role="user", content=(picture,)),)),
        CompletionRequest(model="auto", prompt=[1, 2, 3]),
        CompletionRequest(model="auto", prompt=[[1], [2]]),
    )

    assert {round(served(request), 6) for request in unread} == {round(float(outcomes.suffices.mean()), 6)}


def test_a_threshold_parts_numbers_as_their_float32_does() -> None:
    """scikit-learn rounds a number before it compares; what is served compares it as it is, with the same answer."""
    dice = np.random.default_rng(5)
    threshold = np.concatenate([[0.0, 1.0, 1e-40], dice.lognormal(0, 3, 500) * dice.choice([-1, 1], 500)])
    near = np.float32(threshold)
    for number in (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))):
        exact = number.astype(np.float64)
        halfway = (exact + near) / 2  # where rounding may go either way
        for value in (exact, halfway, np.nextafter(halfway, -np.inf), np.nextafter(halfway, np.inf)):
            assert ((value.astype(np.float32) > threshold) == (value > _in_float64(threshold))).all()


@pytest.mark.parametrize(
    ("file", "written", "words"),
    [
        (MANIFEST, None, "complexity.json cannot be read"),
        (WEIGHTS, None, "complexity.npz cannot be read"),
        (MANIFEST, b"{", "states no sha256"),
        (MANIFEST, b"\xff", "states no sha256"),
        (MANIFEST, b"[]", "states no sha256"),
        (MANIFEST, b'{"format": 5}', "states no sha256"),
        (WEIGHTS, b"", "does not match the checksum"),
    ],
)
def test_half_an_artefact_is_refused(tmp_path: Path, file: str, written: bytes | None, words: str) -> None:
    """Whichever file is missing, cut or of something else: the refusal names it, and what helps."""
    for name in (WEIGHTS, MANIFEST):
        shutil.copy(ARTIFACTS / name, tmp_path / name)
    (tmp_path / file).unlink()
    if written is not None:
        (tmp_path / file).write_bytes(written)

    with pytest.raises(ArtifactMismatch, match=f"{words}.*restore"):
        Complexity.load(tmp_path)


def test_the_version_is_that_of_the_weights() -> None:
    """So that what was measured of other scores is told apart."""
    stated = json.loads((ARTIFACTS / MANIFEST).read_text())["sha256"]

    assert len(Complexity.load().version) == 16 and stated.startswith(Complexity.load().version)


def test_weights_that_do_not_match_their_checksum_are_refused(tmp_path: Path) -> None:
    """One changed byte is enough; so is a format of another version."""
    for name in (WEIGHTS, MANIFEST):
        shutil.copy(ARTIFACTS / name, tmp_path / name)
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / WEIGHTS).write_bytes(data)

    with pytest.raises(ArtifactMismatch, match="checksum"):
        Complexity.load(tmp_path)

    shutil.copy(ARTIFACTS / WEIGHTS, tmp_path / WEIGHTS)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(ArtifactMismatch, match="format 0"):
        Complexity.load(tmp_path)


def test_serving_needs_no_scikit_learn() -> None:
    """The gateway's memory holds numpy and the weights, not the library that fitted them."""
    program = (
        "import sys; from router.complexity.classifier import Complexity; Complexity.load(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('sklearn', 'scipy')])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_shipped_model_tells_easy_from_hard() -> None:
    """A plain question is easier for a small model than a problem of many steps."""
    complexity = Complexity.load()
    easy = chat(text="What is the capital of France?")
    hard = chat(
        text="Write a python function that, given a list of n integers, returns the number of ways to choose a subset "
        "whose sum is divisible by k, and prove that its running time is O(nk)."
    )

    assert 0 <= complexity(hard) < complexity(easy) <= 1


def test_the_last_user_turn_is_read() -> None:
    """Difficulty is that of what is asked now, not of what was said before; parts are lines of it."""
    long_turn = "Explain in detail how the two proofs differ, and which of them carries over to infinite sets."
    request = ChatRequest(
        model="auto",
        messages=(
            Message(role="system", content="Be kind."),
            Message(role="user", content="Earlier"),
            Message(role="assistant", content="Yes."),
            Message(role="user", content=(TextPart(long_turn), TextPart("1, 2, 3"))),
            Message(role="tool", content="42", tool_call_id="c"),
        ),
    )

    assert text_of(request) == f"{long_turn}\n1, 2, 3"


def test_a_short_turn_is_read_with_the_one_before_it() -> None:
    """ "And in Python?" means little alone, so a conversation does not flip models for it."""
    turns = (Message(role="user", content="Sort a list of dates."), Message(role="user", content="And in Python?"))

    assert text_of(ChatRequest(model="auto", messages=turns)) == "Sort a list of dates.\nAnd in Python?"


def test_what_is_read_of_a_huge_prompt_is_bounded() -> None:
    """The cost of a decision does not grow with the prompt."""
    request = chat(text="a" * 10_000_000 + "the end")

    assert len(text_of(request)) == HEAD + TAIL + 1
    assert text_of(request).endswith("the end")


@pytest.mark.parametrize("text", ["", " ", "hello", "\ud800", "\x00", "字", "?" * 3_000])
def test_every_text_has_finite_features(text: str) -> None:
    """No text, however odd, gives anything but finite numbers of the one shape."""
    reading = read_text(text)

    assert reading.stats.shape == (len(STATS_NAMES),)
    assert np.isfinite(reading.stats).all()
    assert len(reading.buckets) == len(reading.is_first)
    assert reading.is_first.sum() == len(set(reading.buckets.tolist()))


def test_words_and_pairs_are_counted() -> None:
    """Three words have three singles and two pairs; what repeats is known as such, whatever its case."""
    assert sorted(read_text("Row row boat").is_first.tolist()) == [0, 1, 1, 1, 1]


def test_the_pipe_answers_line_by_line_and_survives_faults() -> None:
    """Each line of input has one line of answer; a faulty one says why and the next is answered."""
    lines = [
        '{"prompt": "hello"}',
        "",
        "not json",
        '{"prompt": 3}',
        "{}",
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": "hello"}]}',
    ]
    out = io.StringIO()

    score_complexity(io.StringIO("\n".join(lines)), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]

    assert [list(answer) for answer in answers] == [["small_suffices"], *[["error"]] * 4, ["small_suffices"]]
    assert answers[0] == answers[-1]
    assert 0 <= answers[0]["small_suffices"] <= 1


def test_a_score_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier turns of a conversation that wavers are remembered; remembered is what was said, and bounded."""
    complexity = Complexity.load()
    asked: list[str] = []
    score = complexity.score
    monkeypatch.setattr(complexity, "score", lambda text: asked.append(text) or score(text))
    monkeypatch.setattr("router.complexity.classifier.MOST_KNOWN", 2)
    texts = ["one and one", "two and two", "one and one", "three and three", "one and one"]

    said = [complexity(chat(text=text)) for text in texts]

    assert said == [score(text) for text in texts]
    assert asked == ["one and one", "two and two", "three and three", "one and one"]
