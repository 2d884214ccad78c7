# What Postgres keeps for us, it cannot read, swap or change.

from __future__ import annotations

import pytest

from gateway.storage.encryption import Sealer, Unsealable


def test_sealed_bytes_come_back() -> None:
    """Sealing twice gives different bytes, and both open."""
    sealer = Sealer("pepper", "webhook-secret")

    sealed = [sealer.seal(b"secret", "whs_1") for _ in range(2)]

    assert sealed[0] != sealed[1] and all(b"secret" not in one for one in sealed)
    assert [Sealer("pepper", "webhook-secret").unseal(one, "whs_1") for one in sealed] == [b"secret", b"secret"]


@pytest.mark.parametrize(
    "pepper, purpose, label",
    [("other", "webhook-secret", "whs_1"), ("pepper", "idempotency", "whs_1"), ("pepper", "webhook-secret", "whs_2")],
)
def test_sealed_bytes_open_in_their_place_alone(pepper: str, purpose: str, label: str) -> None:
    """Another pepper, purpose or row opens nothing."""
    sealed = Sealer("pepper", "webhook-secret").seal(b"secret", "whs_1")

    with pytest.raises(Unsealable):
        Sealer(pepper, purpose).unseal(sealed, label)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"\x02" + b[1:], lambda b: b""])
def test_damaged_bytes_do_not_open(damage: object) -> None:
    """A cut, an unknown version and nothing at all are told from a secret."""
    sealer = Sealer("pepper", "webhook-secret")

    with pytest.raises(Unsealable):
        sealer.unseal(damage(sealer.seal(b"secret", "whs_1")), "whs_1")  # type: ignore[operator]
