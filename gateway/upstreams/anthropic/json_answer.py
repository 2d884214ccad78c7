# Answers in JSON: by Claude's structured outputs where the model has them and the caller a schema, else by a tool that
# the model is made to call, whose input is the answer.

from __future__ import annotations

from typing import Any

from gateway.model_facts.claude_models import ClaudeRules
from gateway.upstreams.anthropic.schema import binding_schema, is_open
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool

NAME = "json_answer"
DESCRIPTION = "Gives the answer to the user. Call it once; its input is the whole answer, as JSON."


def ask_for_json(body: dict[str, Any], request: ChatRequest, rules: ClaudeRules) -> None:
    """Have the body of a message's request ask for the JSON that the chat asks for, if it does. Raises Unsayable."""
    form = request.response_format
    schema: dict[str, Any] | None = None
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema
        if schema is not None and rules.takes_format and not is_open(schema):
            body["output_config"] = {**body.get("output_config", {}), "format": _format(schema)}
            return
    if (name := answer_tool(request)) is None:
        return
    if not rules.takes_forced_tools:
        what = "without a schema" if schema is None else "with fields that its schema does not name"
        right = "Send 'response_format' with a json_schema whose objects name their 'properties'."
        raise Unsayable(f"The model that answers here knows no JSON {what}. {right}", param="response_format")
    tool = {"name": name, "description": DESCRIPTION, "input_schema": _input_schema(schema)}
    is_alone = not request.tools or request.tool_choice == "none"
    body["tools"] = [*body.get("tools", ()), tool]
    choice = {"type": "tool", "name": name} if is_alone else {"type": "any"}
    one_call = is_alone or request.parallel_tool_calls is False
    body["tool_choice"] = choice | ({"disable_parallel_tool_use": True} if one_call else {})


def answer_tool(request: ChatRequest) -> str | None:
    """Return the name of the tool whose input is the answer to a chat, where Claude may be asked for it in that way.

    It is none of the caller's tools. A chat that calls one of those in any case has no other answer.
    """
    if not isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        return None
    taken = {tool.function.name for tool in request.tools or ()}
    if taken and (request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)):
        return None
    name = NAME
    while name in taken:
        name += "_"
    return name


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": binding_schema(schema)}


def _input_schema(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of the tool's input, which is an object."""
    if schema is None:
        return {"type": "object"}
    if "type" not in schema and "properties" in schema:
        return {"type": "object", **schema}
    if schema.get("type") != "object":
        words = "The model that answers here takes no 'response_format' whose schema is of another type than an object."
        raise Unsayable(words, param="response_format")
    return schema
