"""Rare collections: for as long as anybody wants them, and then as before."""

import gc

from oncely._util.garbage import rarely_collecting


def test_restored_when_the_last_is_done() -> None:
    """The process's own settings are back once all are done, in whatever order."""
    before = gc.get_threshold()
    first, second = rarely_collecting(), rarely_collecting()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold()[0] > before[0]
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > before[0]
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
