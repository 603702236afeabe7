"""The entries of what people change, with and without their counts."""

import pytest

from oncely.core.activity import AuditEntry
from oncely.stores.store import Store

_BEGUN = AuditEntry(0, 0.0, "ann", "reset", "billing", "m", 3, None, None, "why 🧾")


class AuditStatements:
    """A store's audit. A store that keeps none takes entries, and has none."""

    def test_audit_begun(self, store: Store) -> None:
        """A noted entry is read back as it is, without counts; the store gives it its time and the
        number that it returns, and the newest comes first.
        """
        numbers = [store.note(_BEGUN._replace(message_id=id_)) for id_ in ("a", "b")]
        found = store.audit(10)
        if not store.keeps_operations:
            assert (numbers, list(found)) == ([0, 0], [])
            return
        assert [(each.id, each.message_id) for each in found] == [
            (numbers[1], "b"),
            (numbers[0], "a"),
        ]
        assert [each.message_id for each in store.audit(10, numbers[1])] == ["a"]
        now = store.load(()).now
        assert found[0].at == pytest.approx(now, abs=60)
        assert found[0]._replace(id=0, at=0.0, message_id="m") == _BEGUN
        unknown = _BEGUN._replace(chosen=None, consumer="", message_id="", why="")
        store.note(unknown)
        assert store.audit(1)[0]._replace(id=0, at=0.0) == unknown

    def test_audit_counts(self, store: Store) -> None:
        """Counts go to the entry of that number, and to no other; how many were refused may stay
        unknown. To repeat it changes nothing.
        """
        one, two, _ = (store.note(_BEGUN) for _ in range(3))
        for _ in range(2):
            store.note_counts(one, 2**40, 1)
            store.note_counts(two, 2, None)
        if not store.keeps_operations:
            assert list(store.audit(10)) == []
            return
        found = [(each.chosen, each.changed, each.refused) for each in store.audit(10)]
        assert found == [(3, None, None), (3, 2, None), (3, 2**40, 1)]
