# Another endpoint is one file and one row of the table: a gateway and a worker run with a toy dialect that is written
# into a copy of gateway/dialects/, and HTTP, batches, /v1/route, /openapi.json, errors and advice know it.

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fault_house import FaultHouse, running_fault_house
from tests.support.fault_service import run_tollgate
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
TOY = """
import msgspec
from msgspec import Struct

from gateway.dialects.checks import require
from gateway.dialects.endpoint import ApiEndpoint, Asked, ErrorShape
from protocol.chat import ChatRequest, Message
from protocol.events import Delta


class ToyRequest(Struct, frozen=True):
    model: str
    riddle: str
    stream: bool = False


class ToyError(Struct):
    oops: str


class ToyWriter:
    def __init__(self, request, request_id, created):
        self._asked = request.model

    def whole(self, reply, whole, usage):
        said = whole.choices[0].message.content
        return msgspec.json.encode({"toy": said, "asked": self._asked, "used": reply.target.model.name})

    def pieces(self, reply, events):
        return b"".join(b"toy: %b\\n" % event.text.encode() for event in events if isinstance(event, Delta))

    def error(self, error):
        return b"oops: %b\\n" % error.message.encode()


def check_toy(asked):
    require(asked.riddle != "", "riddle", "'riddle' must not be empty.")


def as_chat(asked, extra):
    messages = (Message(role="user", content=asked.riddle),)
    return Asked(ChatRequest(model=asked.model, messages=messages, stream=asked.stream, max_tokens=8), extra)


ENDPOINT = ApiEndpoint(
    path="/v1/toys",
    name="toys",
    operation="create_toy",
    summary="Solve a riddle",
    description="Solve a riddle, whole or as a stream.",
    body_type=ToyRequest,
    check=check_toy,
    translate=as_chat,
    writer=ToyWriter,
    errors=ErrorShape(body=lambda error, _: {"oops": error.message}, schema=ToyError, id_header=b"toy-id"),
    is_for_batches=True,
    route_field="riddle",
)
"""
BODY = {"model": "instant", "riddle": "What has a bed and never sleeps?"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHouse]:
    """A gateway and a worker of this tree, but for one more file and one more row."""
    folder = tmp_path_factory.mktemp("toys")
    package = folder / "gateway"
    package.mkdir()
    (run := folder / "run").mkdir()
    for path in (ROOT / "gateway").iterdir():
        if path.name != "dialects":
            (package / path.name).symlink_to(path)
    shutil.copytree(ROOT / "gateway" / "dialects", package / "dialects")
    (package / "dialects" / "toys.py").write_text(f"from __future__ import annotations\n{TOY}")
    table = package / "dialects" / "table.py"
    rows = table.read_text().replace("    responses.ENDPOINT,\n", "    responses.ENDPOINT,\n    toys.ENDPOINT,\n")
    table.write_text(rows.replace("messages, responses\n", "messages, responses, toys\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with running_fault_house(run, gateways=1, run=run_tollgate) as house:
            yield house


@pytest.fixture(scope="module")
def client(house: FaultHouse) -> Iterator[httpx.Client]:
    """A client of a team."""
    key = next(iter(house.make_team("toy-team", {}, [{}]).values()))
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=house.gateways[0].url, headers=headers, timeout=30) as client:
        yield client


def test_it_is_answered_over_http(client: httpx.Client) -> None:
    """Whole and as a stream, in its own shape, by the pipeline that answers all others."""
    whole = client.post("/v1/toys", json=BODY)
    stream = client.post("/v1/toys", json={**BODY, "stream": True})

    assert whole.status_code == 200 and whole.json().keys() == {"toy", "asked", "used"}
    assert whole.headers["toy-id"] == whole.headers["x-request-id"] and whole.headers["x-model-used"] == "instant"
    assert stream.text.startswith("toy: ") and stream.headers["content-type"].startswith("text/event-stream")


def test_its_errors_have_its_shape(client: httpx.Client) -> None:
    """From its checks as from anything else on its path."""
    refused = client.post("/v1/toys", json={**BODY, "riddle": ""})
    unknown = client.get("/v1/toys/one")

    assert (refused.status_code, refused.json()) == (400, {"oops": "'riddle' must not be empty."})
    assert unknown.status_code == 404 and unknown.json().keys() == {"oops"}
    assert "Is /v1/toys meant?" in client.post("/toys", json=BODY).json()["error"]["message"]


def test_it_takes_batches(client: httpx.Client) -> None:
    """Its requests are read, answered and written as over HTTP."""
    requests = [BODY, {**BODY, "riddle": ""}]
    made = client.post("/v1/batch", json={"endpoint": "/v1/toys", "requests": requests}).raise_for_status().json()
    until(lambda: client.get(f"/v1/batch/{made['batch_id']}").json()["ended_at"], within=60)
    lines = client.get(f"/v1/batch/{made['batch_id']}/results").raise_for_status().text.splitlines()
    good, bad = (json.loads(line)["response"] for line in lines)

    assert (good["status_code"], good["body"]["used"]) == (200, "instant")
    assert (bad["status_code"], bad["body"]) == (400, {"oops": "'riddle' must not be empty."})


def test_its_route_is_explained_and_it_is_described(client: httpx.Client) -> None:
    """/v1/route knows its bodies by their field, and /openapi.json has its types."""
    told = client.post("/v1/route", json=BODY).raise_for_status().json()
    described = client.get("/openapi.json").json()
    refused = client.post("/v1/route", json={"model": "instant"}).json()["error"]["message"]

    assert told["model_used"] == "instant"
    assert described["paths"]["/v1/toys"]["post"]["operationId"].endswith("CreateToy")
    assert {"ToyRequest", "ToyError"} <= described["components"]["schemas"].keys()
    assert "'messages', 'prompt', 'input', 'documents' and 'riddle'" in refused
