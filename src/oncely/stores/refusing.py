"""Storing messages of which the store refuses some: for a letter that its encoding lacks, say."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from oncely.core.errors import StoreError

T = TypeVar("T")


def refused_of(
    put: Callable[[Sequence[T]], object], batch: Sequence[T]
) -> Mapping[int, StoreError]:
    """Put all together or, where the store refuses that, each alone; return why some are refused,
    by their places. Raises StoreDenied, and errors after which another try may succeed.
    """
    if _refusal(put, batch) is None:
        return {}
    alone = {index: _refusal(put, [each]) for index, each in enumerate(batch)}
    return {index: error for index, error in alone.items() if error is not None}


def _refusal(put: Callable[[Sequence[T]], object], batch: Sequence[T]) -> StoreError | None:
    try:
        put(batch)
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        return error
    return None
