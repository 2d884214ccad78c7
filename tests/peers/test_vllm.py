# vLLM's own tests of chats, completions and messages (its source archive or a clone in PEERS/vllm) against a gateway
# before our engine with a tiny random model: what is asked for holds, whatever the weights say. Failures are explained.

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.engine_suite import RANDOM, outcomes_of, unexplained
from tests.support.house import House

SUITE = Path(os.environ.get("PEERS", ".")).absolute() / "vllm"
STAND_IN = Path(__file__).parents[1] / "support" / "vllm_suite.py"
GET = "git clone --depth 1 https://github.com/vllm-project/vllm into PEERS, or unpack its source archive (0.33.0) there"
MODELS = (
    *("HuggingFaceH4/zephyr-7b-beta", "zephyr-lora", "Qwen/Qwen2.5-1.5B-Instruct", "claude-3-7-sonnet-latest"),
    "Qwen/Qwen3-0.6B",
)
FILES = {
    "entrypoints/openai/chat_completion": ("chat", "chat_completion", "chat_logit_bias_validation"),
    "entrypoints/openai/completion": ("completion",),
    "entrypoints/anthropic": ("messages",),
}
ALONE = "vLLM alone answers with it; that it has no effect here is told in a header"
SAID = "the 400 says what an id is, and repeats no word that stands for one"
EXPECTED = {
    "chat::test_prompt_logprobs_chat": ALONE,
    "chat::test_more_than_one_prompt_logprobs_chat": ALONE,
    "chat::test_chat_completion_stream_options": "chunks that come together have one count, where vLLM's grows by each",
    "chat_completion::test_kv_transfer_prompt_token_ids_round_trip": ALONE,
    "chat_completion::test_kv_transfer_prompt_token_ids_streaming": ALONE,
    "chat_completion::test_per_request_metrics_non_streaming": ALONE,
    "chat_completion::test_per_request_metrics_on_final_usage_chunk": ALONE,
    "completion::test_completion_truncation_side_controls_prompt_truncation": ALONE,
    "completion::test_logprob_token_ids": ALONE,
    "completion::test_logprob_token_ids_stream": ALONE,
    "completion::test_prompt_logprobs_completion": ALONE,
    "completion::test_completion_stream_options": f"continuous_usage_stats: {ALONE}",
    "completion::test_batch_completions": "beam search is vLLM's alone",
    "completion::test_single_completion": "a token is a byte here, so the prompt has more of them",
    "chat_logit_bias_validation::test_chat_logit_bias_non_integer_key": SAID,
    "chat_logit_bias_validation::test_chat_logit_bias_multiple_non_integer_keys": SAID,
    "chat::test_chat_completion_n_parameter_streaming": RANDOM,
    "chat::test_single_chat_session": "our usage has cost_usd and details, where vLLM's is three numbers",
    "chat::test_chat_streaming": "the last chunk has the finish_reason and no words, as OpenAI's",
    "chat::test_custom_role": "roles are OpenAI's",
    "chat::test_long_seed": "asks for pydantic's words; the 400 says the range in ours",
    "chat::test_invocations": "/invocations is SageMaker's, and no key is sent to it",
    "chat::test_structured_outputs_choice_chat": RANDOM,
    "chat::test_structured_outputs_json_chat": RANDOM,
    "chat::test_response_format_json_object": RANDOM,
    "chat::test_response_format_json_schema": RANDOM,
    "chat::test_complex_message_content": RANDOM,
    "messages::test_anthropic_tool_call": RANDOM,
    "messages::test_anthropic_structured_output": RANDOM,
    "messages::test_anthropic_streaming": "message_start counts the words that come with it, vLLM's says 0",
    "messages::test_anthropic_streaming_cache_usage": "message_start tells apart what the cache had, vLLM's does not",
}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not (SUITE / "tests").exists(), reason=f"SKIPPED: no {SUITE}; {GET}"),
]


def test_its_suite_passes(suite_house: House, suite_model: Path, tmp_path: Path) -> None:
    """But for what stands in EXPECTED."""
    shutil.copy(STAND_IN, tmp_path / "conftest.py")
    for place, names in FILES.items():
        source, target = SUITE / "tests" / place, tmp_path / "tests" / place
        target.mkdir(parents=True, exist_ok=True)
        files = [f"test_{name}.py" for name in names] + ["conftest.py", "utils.py", "__init__.py"]
        for name in files:
            if (source / name).exists():
                shutil.copy(source / name, target / name)
    for name in ("entrypoints/conftest.py", "entrypoints/__init__.py", "__init__.py"):
        shutil.copy(SUITE / "tests" / name, tmp_path / "tests" / name)
    outcomes = outcomes_of(suite_house, suite_model, tmp_path, {"VLLM_PATH": str(SUITE)})

    assert unexplained(outcomes, EXPECTED) == {}
    assert sum(what == "passed" for what, _ in outcomes.values()) >= 20
