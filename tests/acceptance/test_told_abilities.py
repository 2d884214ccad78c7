# What our own engines say that they can do reaches the catalogue by itself: real fronts, one of a model that reads
# pictures and one of texts, behind models whose abilities tollgate.yaml does not name.

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest

from gateway.core.settings import ProviderSettings, Timeouts
from gateway.fleet.told_abilities import ToldAbilities
from router.catalog.targets import Capability, Endpoint
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import SEEING_TEMPLATE, VISION, running_front, write_small_files
from tests.support.house import NEVER_OPENS, model, running_house, settings_for

images = pytest.importorskip("PIL.Image")
CHATS = frozenset((Capability.CHAT,))


def own_engine(name: str, *urls: str) -> ProviderSettings:
    return ProviderSettings(
        name=name,
        format="openai",
        self_hosted=True,
        endpoints=tuple(Endpoint("here", url + "/v1") for url in urls),
        timeouts=Timeouts(connect=10.0, first_token=20.0, between_tokens=20.0, total=30.0),
        breaker=NEVER_OPENS,
    )


def test_gateway_learns_which_engine_reads_pictures(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """From the first call on; a picture for the other is refused, and what the file says is what counts."""
    folder = write_small_files(tmp_path / "seer", SEEING_TEMPLATE, VISION)
    written = BytesIO()
    images.new("RGB", (16, 16)).save(written, "PNG")
    url = {"url": f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"}
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": url}]
    with (
        running_front(folder, FakeEngine(speaking([70]), max_model_len=512)) as seer,
        running_front(write_small_files(tmp_path / "reader"), FakeEngine(speaking([70]))) as reader,
    ):
        providers = {"a": own_engine("a", seer), "b": own_engine("b", reader)}
        models = {
            "seer": model("seer", "a", upstream_model="tiny", capabilities=CHATS, follows_engine=True),
            "reader": model("reader", "b", upstream_model="tiny", capabilities=CHATS, follows_engine=True),
            "said": model("said", "a", upstream_model="tiny", capabilities=CHATS),
        }
        more = {"providers": providers, "models": models, "auto": {}, "aliases": {}}
        with running_house(settings_for(database_url, redis_url, "", tmp_path / "data", **more)) as house:
            with house.client() as client:
                answers = [
                    client.post(
                        "/v1/chat/completions",
                        json={"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 1},
                    )
                    for name in models
                ]
                shown = {each["id"]: each["abilities"] for each in client.get("/v1/models").json()["data"]}

    assert [answer.status_code for answer in answers] == [200, 400, 400], answers[0].text
    assert "lacks vision" in answers[1].json()["error"]["message"]
    assert shown == {"seer": ["chat", "vision"], "reader": ["chat"], "said": ["chat"]}


def test_model_can_do_what_every_replica_says() -> None:
    """Not what one of them says, nor what the file says otherwise; a name that is not known here is passed over, and
    recordings, which have no price. The first word of one that comes late is news, also that it can do nothing more."""
    told = ToldAbilities()
    own = own_engine("a", "http://one", "http://two")
    models = {"tiny": model("tiny", "a", capabilities=CHATS, follows_engine=True)}
    settings = settings_for("", "", "", Path(), providers={"a": own}, models=models)

    def can() -> set[str]:
        return {each.value for each in told.join(settings).models["tiny"].capabilities}

    before = can()
    news = [told.hear("http://one/v1", said) for said in (("tools", "vision", "smell", "audio"), ("vision", "tools"))]
    one = can()
    news.append(told.hear("http://two/v1", ()))
    both = can()
    news.append(told.hear("http://two/v1", ("tools",)))

    assert (before, one, both, can()) == ({"chat"}, {"chat", "tools", "vision"}, {"chat"}, {"chat", "tools"})
    assert news == [True, False, True, True]
    assert told.hear("http://one/v1", ()) and can() == {"chat"}


def test_a_model_follows_until_an_engine_of_it_was_heard() -> None:
    """What is no engine of ours is one that can do nothing more, unless it was heard as one before."""
    told = ToldAbilities()
    own = own_engine("a", "http://one")
    models = {"tiny": model("tiny", "a", capabilities=CHATS, follows_engine=True)}
    settings = settings_for("", "", "", Path(), providers={"a": own}, models=models)
    follows = [told.join(settings).models["tiny"].follows_engine]
    news = [told.hear_nothing("http://one/v1")]
    follows.append(told.join(settings).models["tiny"].follows_engine)
    told.hear("http://one/v1", ("tools",))
    news.append(told.hear_nothing("http://one/v1"))

    assert (follows, news) == ([True, False], [True, False])
    assert Capability.TOOLS in told.join(settings).models["tiny"].capabilities
