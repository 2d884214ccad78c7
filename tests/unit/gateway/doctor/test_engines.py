# What `tollgate doctor` makes of an engine's own words.

from __future__ import annotations

from typing import Any

import pytest

from gateway.doctor.upstreams import finding_of_engine
from protocol.serving.engine_load import EngineLoad
from router.catalog.targets import Capability
from tests.support.house import model

SEES, READS = (frozenset((Capability.CHAT, *more)) for more in ((Capability.VISION,), ()))


@pytest.mark.parametrize(
    ("capabilities", "said", "kind", "words"),
    [
        (SEES, {"input_modalities": ("text", "image")}, "ok", "serves tiny: 2 run, 0 wait"),
        (READS, {"input_modalities": ("text",)}, "ok", "serves tiny"),
        (SEES, {}, "ok", "serves tiny"),  # an engine of before
        (SEES, {"input_modalities": ("text",)}, "fault", "reads no pictures, and mine has vision"),
        (READS, {"input_modalities": ("text", "image")}, "warning", "no model of the catalogue sends it any"),
        (SEES, {"status": "draining"}, "warning", "is draining"),
        (SEES, {"model_id": "other"}, "fault", "serves other, and the catalogue asks for tiny"),
    ],
)
def test_an_engine_says_what_the_catalogue_expects(
    capabilities: frozenset[Capability], said: dict[str, Any], kind: str, words: str
) -> None:
    """Its names, its state, and whether it reads pictures."""
    mine = model("mine", upstream_model="tiny", capabilities=capabilities)
    load = EngineLoad(**{"instance_id": "a", "model_id": "tiny", "running": 2} | said)
    found = finding_of_engine("engine own", "here", load, [mine])

    assert found.state == kind
    assert words in found.words


def test_engine_whose_abilities_are_left_to_it_is_told_nothing() -> None:
    """The gateway learns from it that it reads pictures: there is nothing to add."""
    mine = model("mine", upstream_model="tiny", capabilities=READS, follows_engine=True)
    load = EngineLoad(instance_id="a", model_id="tiny", input_modalities=("text", "image"))

    assert finding_of_engine("engine own", "here", load, [mine]).state == "ok"
