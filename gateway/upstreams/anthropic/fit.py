# A request for Claude, made one that its generation takes. The API refuses what a model does not know, and some fields
# together: what changes no meaning is left out, thinking is asked for in the model's own way, and a meaning that the
# model lacks is refused by name.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.model_facts.claude_models import ALL_EFFORTS, ClaudeRules, Sampling
from gateway.upstreams.wire.unsayable import Unsayable

Block = dict[str, Any]

LEAST_BUDGET = 1_024  # tokens of thinking
BUDGETS = {"low": 2_048, "medium": 8_192, "high": 16_384, "xhigh": 32_000, "max": 32_000}  # where no effort is known
ANSWER_SHARE = 5  # of a limit, one part in so many is kept for the answer when an effort is told as a budget
LEAST_TOP_P = 0.95  # beside thinking
ON = ("enabled", "adaptive")
FORCED = ("any", "tool")


def fit(body: Block, rules: ClaudeRules) -> list[str]:
    """Change the body of a message's request to what the model takes; return the names of what it had to leave out.

    Raises Unsayable for a reply to go on with, or a forced call of a tool, at a model that knows no such thing.
    """
    last = body["messages"][-1]["role"] if body["messages"] else None  # of none the upstream says what is wrong
    if last == "assistant" and not rules.takes_prefill:
        raise Unsayable(
            "The model that answers here goes on with no reply that was begun. End 'messages' with a user's turn, "
            "or ask another model.",
            param="messages",
        )
    if body.get("tool_choice", {}).get("type") in FORCED and not rules.takes_forced_tools:
        raise Unsayable(
            "The model that answers here cannot be made to call a tool. Send 'tool_choice' auto, or ask another model.",
            param="tool_choice",
        )
    return [*_fit_thinking(body, rules), *_fit_sampling(body, rules)]


def _fit_thinking(body: Block, rules: ClaudeRules) -> Iterator[str]:
    asked: Block = body.pop("thinking", None) or {}
    config = dict(body.pop("output_config", None) or {})
    effort = config.pop("effort", None)
    kind = asked.get("type")
    is_forced = body.get("tool_choice", {}).get("type") in FORCED  # which the API takes of no model that thinks
    thinking: Block | None = None
    if kind in ON and not is_forced:
        thinking = _thinking(asked, effort, body, rules)
        if thinking is None:
            yield "thinking"
        elif kind == "enabled" and thinking["type"] == "adaptive":
            effort = effort or effort_of(asked["budget_tokens"])
    elif kind is not None or (is_forced and rules.thinks_unasked):
        if rules.offs:
            thinking = asked if kind in rules.offs else {"type": rules.offs[0]}
        if kind in ON or (rules.thinks_unasked and not rules.offs):
            yield "thinking"
        if rules.thinks_unasked:  # all that there is, where it cannot be turned off; and the most that goes without
            effort = "low" if not rules.offs else "high" if effort in ("xhigh", "max") else effort
    if effort is not None and effort not in rules.efforts:
        if not rules.efforts and kind != "adaptive":  # else it is in the budget
            yield "output_config.effort"
        lower = ALL_EFFORTS[: ALL_EFFORTS.index(effort) + 1]
        effort = next((each for each in reversed(lower) if each in rules.efforts), None)
    if effort is not None:
        config["effort"] = effort
    body |= {"thinking": thinking} if thinking else {}
    body |= {"output_config": config} if config else {}


def _thinking(asked: Block, effort: str | None, body: Block, rules: ClaudeRules) -> Block | None:
    """Return how the model is asked to think, or ``None`` where it cannot, or has no room for it."""
    is_budget = asked["type"] == "enabled"
    if rules.takes_budget and (is_budget or not rules.takes_adaptive):
        if is_budget:
            budget = min(asked["budget_tokens"], body["max_tokens"] - 1)
        else:
            budget = min(BUDGETS[effort or "high"], body["max_tokens"] * (ANSWER_SHARE - 1) // ANSWER_SHARE)
        if budget >= LEAST_BUDGET and not _goes_on_unthought(body["messages"]):
            return asked | {"type": "enabled", "budget_tokens": budget}
    if not rules.takes_adaptive:
        return None
    return {name: value for name, value in asked.items() if name != "budget_tokens"} | {"type": "adaptive"}


def _goes_on_unthought(turns: list[Block]) -> bool:
    """Whether the model goes on from calls before which it did not think, or whose thinking the caller did not keep:
    with a budget it would be refused."""
    if len(turns) < 2 or isinstance(turns[-1]["content"], str) or isinstance(turns[-2]["content"], str):
        return False
    goes_on = any(block["type"] == "tool_result" for block in turns[-1]["content"])
    first = turns[-2]["content"][0]["type"] if turns[-2]["content"] else ""
    return goes_on and first not in ("thinking", "redacted_thinking")


def effort_of(budget: int) -> str:
    """Return the effort that comes nearest to a budget of so many tokens."""
    return "low" if budget <= BUDGETS["low"] else "medium" if budget <= BUDGETS["medium"] else "high"


def _fit_sampling(body: Block, rules: ClaudeRules) -> Iterator[str]:
    """Leave out what the model, or its thinking, takes no wish for; what is the default is no wish."""
    thinks = body.get("thinking", {}).get("type") in ON
    if rules.sampling is Sampling.NONE or thinks:
        if body.get("temperature") is not None and body["temperature"] != 1:
            yield "temperature"
        top_p = body.get("top_p")
        keeps_top_p = rules.sampling is not Sampling.NONE and top_p is not None and top_p >= LEAST_TOP_P
        if top_p is not None and top_p < 1 and not keeps_top_p:
            yield "top_p"
        if body.get("top_k"):
            yield "top_k"
        for name in ("temperature", "top_k", *(() if keeps_top_p else ("top_p",))):
            body.pop(name, None)
    elif rules.sampling is Sampling.ONE and "temperature" in body and body.pop("top_p", 1) < 1:
        yield "top_p"
