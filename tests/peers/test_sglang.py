# SGLang's own tests of its HTTP APIs (a clone in PEERS/sglang) against a gateway before our engine with a tiny random
# model: what is asked for holds, whatever the weights say. Failures are explained; its tests are those of August 2026.

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.engine_suite import RANDOM, outcomes_of, unexplained
from tests.support.house import House

SUITE = Path(os.environ.get("PEERS", ".")).absolute() / "sglang"
STAND_IN = Path(__file__).parents[1] / "support" / "sglang_suite.py"
GET = (
    "git clone --depth 1 https://github.com/sgl-project/sglang into PEERS; its test/ and python/sglang/test/ are enough"
)
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
FILES = {
    "registered/openai_server/function_call": ("openai_function_calling", "anthropic_tool_use"),
    "registered/openai_server/basic": ("openai_server",),
    "registered/openai_server/validation": ("matched_stop", "request_length_validation"),
    "registered/constrained_decoding": ("constrained_decoding",),
    "manual/openai_server/features": ("cache_report", "continuous_usage_stats", "structural_tag"),
    "manual/openai_server/function_call": ("tool_choice",),
}
# The same tests again, of other parsers, grammar backends and frontends: there is one of each here.
AGAIN = ("Qwen25", "Mistral", "Lfm2", "Pythonic", "Rust", "LLGuidance", "Outlines")
NATIVE = "asks /generate or /v1/score, SGLang's own API"
LONG = "a random model may write arguments or a text up to its output limit, for 90 s, and end within a JSON text"
STOPS = (
    "matched_stop is SGLang's alone, where ours is stop_reason, as vLLM's; stop_regex has no effect, as a header tells"
)
BLOCKS = "the cache holds whole blocks of 16 tokens, where SGLang's holds each"
CONTEXT = "asks a server that was started with a context of 1,000 tokens"
WORDS = "asks for SGLang's words; the 400 says what is wrong in ours"
LIST = "asks for a server of one model, with max_model_len and root; ours has two, with context"
EMPTY = "the last chunk has the finish_reason and no words, as OpenAI's, where SGLang's has an empty word"
TAGS = "structural_tag is xgrammar's alone: a 400 that names it"
KITS = ("complex_json", "custom_log_format", "date", "email", "greeting", "hex_color", "number", "phone")
EXPECTED_OF = {
    "anthropic_tool_use.TestAnthropicToolUse": {
        **dict.fromkeys(("tool_result_multi_turn", "tool_use_format", "tool_use_streaming"), RANDOM),
        **dict.fromkeys(("tool_choice_any", "tool_choice_specific", "tool_use_streaming_event_sequence"), LONG),
    },
    "cache_report.TestCacheReport": {
        "cache_report_openai": BLOCKS,
        "cache_salt_effectiveness": BLOCKS,
        "cache_split_prefill_openai": BLOCKS,
        "generate": NATIVE,
    },
    "constrained_decoding.TestXGrammarBackend": {
        **{f"{kind}_generate_{name}": NATIVE for kind in ("ebnf", "regex") for name in KITS},
        "ebnf_generate_all_optional_function_params": NATIVE,
        "json_generate": NATIVE,
        "mix_json_and_other": NATIVE,
        "json_mode_response": RANDOM,
        "json_mode_with_streaming": RANDOM,
    },
    "matched_stop.TestMatchedStop": dict.fromkeys(
        ("finish_length", "finish_stop_eos", "finish_stop_regex_str", "finish_stop_str"), STOPS
    ),
    "openai_function_calling.TestOpenAIServerFunctionCalling": {
        "function_call_required": LONG,
        "function_call_specific": LONG,
        "function_calling_format": LONG,
        "function_call_strict": RANDOM,
        "function_calling_streaming_args_parsing": RANDOM,
        "function_calling_streaming_simple": RANDOM,
        "streaming_multiple_choices_finish_reason": LONG,
    },
    "openai_server.TestOpenAIServer": {
        "chat_completion_stream": EMPTY,
        "completion_stream": EMPTY,
        "model_list": LIST,
        "retrieve_model": LIST,
        "response_prefill": RANDOM,
        "regex": LONG,
        "ebnf_strict_json": LONG,
        "stop_sequences": "Anthropic takes no stop sequence of white space alone",
    },
    "openai_server.TestOpenAIServerv1Responses": {
        "model_list": LIST,
        "regex": LONG,
        "response_completion_stream": "a random model writes up to its output limit: response.incomplete",
        "response_prefill": RANDOM,
    },
    "openai_server.TestOpenAIV1Score": dict.fromkeys(
        ("score_error_handling", "score_text_input", "score_token_input"), NATIVE
    ),
    "request_length_validation.TestRequestLengthValidation": {
        "input_length_longer_than_context_length": CONTEXT,
        "input_length_longer_than_context_length_streaming": CONTEXT,
        "input_length_longer_than_maximum_allowed_length": CONTEXT,
        "max_tokens_validation": CONTEXT,
        "token_ids_logprob_batch_with_one_oov": NATIVE,
        "token_ids_logprob_out_of_vocabulary": NATIVE,
        "token_ids_logprob_rejects_nested_list": NATIVE,
        "token_ids_logprob_valid": NATIVE,
    },
    "structural_tag.TestStructuralTagXGrammarBackend": {
        "stag_constant_str_openai": TAGS,
        "stag_json_schema_openai": TAGS,
    },
    "tool_choice.TestToolChoiceLlama32": {
        "complex_parameters_required_non_streaming": LONG,
        "required_streaming_arguments_chunks_json": LONG,
        "conflicting_defs_required_tool_choice": "each tool's $defs are its own, where SGLang refuses two of one name",
        "error_handling_invalid_tool_choice": WORDS,
        "invalid_json_schema_in_tool": WORDS,
    },
}
EXPECTED = {f"{group}::test_{name}": why for group, whys in EXPECTED_OF.items() for name, why in whys.items()}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1600),
    pytest.mark.skipif(not (SUITE / "test").exists(), reason=f"SKIPPED: no {SUITE}; {GET}"),
]


def test_its_suite_passes(suite_house: House, suite_model: Path, tmp_path: Path) -> None:
    """But for what stands in EXPECTED."""
    shutil.copy(STAND_IN, tmp_path / "conftest.py")
    (tmp_path / "tests").mkdir()
    for place, names in FILES.items():
        for name in names:
            shutil.copy(SUITE / "test" / place / f"test_{name}.py", tmp_path / "tests" / f"test_{name}.py")
    once = ("-k", " and ".join(f"not {name}" for name in AGAIN))
    outcomes = outcomes_of(suite_house, suite_model, tmp_path, {"SGLANG_PATH": str(SUITE)}, *once)

    assert unexplained(outcomes, EXPECTED) == {}
    assert sum(what == "passed" for what, _ in outcomes.values()) >= 50
