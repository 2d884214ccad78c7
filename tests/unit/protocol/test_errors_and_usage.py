# Two small shapes that everything leans on: the error object, and usage that adds up.

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core import errors as gateway_errors
from protocol import errors as protocol_errors
from protocol.errors import BadRequest, ServiceError
from protocol.usage import Usage

counts = st.integers(0, 10**9)
usages = st.builds(Usage, counts, counts, counts, counts, counts)


def _family(root: type[ServiceError]) -> list[type[ServiceError]]:
    return [root, *(member for child in root.__subclasses__() for member in _family(child))]


def test_every_error_has_the_four_keys() -> None:
    """Clients read message, type, param and code without asking whether they are there."""
    assert protocol_errors and gateway_errors
    modules = {protocol_errors.__name__, gateway_errors.__name__}  # others take part only where a test imports them
    for kind in [kind for kind in _family(ServiceError) if kind.__module__ in modules]:
        error = kind("Something to say.").body()["error"]

        assert isinstance(error, dict) and list(error) == ["message", "type", "param", "code"], kind
        assert error["message"] == "Something to say." and error["type"], kind
        assert 400 <= kind.status < 600, kind


def test_an_instance_may_say_more_than_its_class() -> None:
    """Status, type, code, param and headers may be given; the class's own stay as they were."""
    error = BadRequest("No.", status=422, code="odd", param="n", headers={"retry-after": "1"})

    assert error.body() == {"error": {"message": "No.", "type": "invalid_request_error", "param": "n", "code": "odd"}}
    assert (error.status, BadRequest.status, error.headers) == (422, 400, {"retry-after": "1"})


@given(usages, usages, usages)
def test_usages_add_up_in_any_order(one: Usage, two: Usage, three: Usage) -> None:
    """Sums of a day do not depend on the order of its rows, and nothing is an empty usage's only effect."""
    assert one + (two + three) == (three + one) + two
    assert one + Usage() == one
    assert (one + two).total_tokens == one.total_tokens + two.total_tokens
