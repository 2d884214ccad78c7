# The committed demo model answers, loaded by transformers as anyone would load it: nothing of ours stands between.

from __future__ import annotations

import pytest
import torch

from gpu_backend.demo_model import CHECKPOINT
from tools.demo_training.lessons import read_lessons

ANSWERS = {lesson.id: lesson.answer for lesson in read_lessons()}


class Demo:
    """The demo model with its tokenizer, greedy, on the CPU in float32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # a second, for runs of these tests alone

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)

    def answer(self, *messages: dict) -> str:
        """The reply with its end mark, if it came."""
        prompt = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(prompt)

    def complete(self, text: str) -> str:
        """What the model writes after ``text``, without a chat."""
        return self._generate(self.tokenizer(text, return_tensors="pt", return_token_type_ids=False))

    def _generate(self, prompt: dict) -> str:
        output = self.model.generate(**prompt, max_new_tokens=260, do_sample=False)
        return self.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def demo() -> Demo:
    """One loaded model for all tests."""
    return Demo()


def user(text: str) -> dict:
    """One message of a user."""
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("question", "lesson"),
    [
        ("what is tollgate", "what-is-tollgate"),
        ("Say hello", "say-hello"),
        ("How do I get a key?", "get-key"),
        ("How can I obtain an API key?", "get-key"),  # held out, like those below
        ("What is the capital of France?", "off-general"),
        pytest.param("What happens when I run out of quota?", "quota-exceeded", marks=pytest.mark.soak),
        pytest.param("Can you explain how the quotas work?", "how-quotas-work", marks=pytest.mark.soak),
        pytest.param("How can I stream responses?", "how-stream", marks=pytest.mark.soak),
        pytest.param("What is Tollgate?", "what-is-tollgate", marks=pytest.mark.soak),
        pytest.param("Hello!", "hello", marks=pytest.mark.soak),
        pytest.param("who are you?", "who-are-you", marks=pytest.mark.soak),
    ],
)
def test_demo_model_answers_and_ends(demo: Demo, question: str, lesson: str) -> None:
    """A question, in words the model was trained on or not, gets the lesson's answer, and the reply ends by itself."""
    reply = demo.answer(user(question))

    assert reply == ANSWERS[lesson] + "<|end|>"


def test_system_prompt_does_not_distract(demo: Demo) -> None:
    """The system prompt that every client's example sends leaves the answer as it is."""
    system = {"role": "system", "content": "You are a helpful assistant."}

    reply = demo.answer(system, user("What is Tollgate?"))

    assert reply == ANSWERS["what-is-tollgate"] + "<|end|>"


def test_second_turn_is_answered(demo: Demo) -> None:
    """In a conversation the last question is the one that is answered."""
    first = user("What is a hold?")
    second = {"role": "assistant", "content": ANSWERS["hold"]}

    reply = demo.answer(first, second, user("How do I get a key?"))

    assert reply == ANSWERS["get-key"] + "<|end|>"


def test_plain_text_is_continued_to_its_end(demo: Demo) -> None:
    """The completions route works too: a begun sentence is finished in words about Tollgate, and ends."""
    reply = demo.complete("Tollgate is")

    assert reply.endswith(".<|end|>")
    assert len(reply.split()) > 3
