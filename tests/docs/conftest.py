"""What the pages on migrations share."""

import pytest
from tests.docs.sections import Charges


@pytest.fixture
def charges() -> Charges:
    """What was charged."""
    return Charges()
