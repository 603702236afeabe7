"""Kafka passes the suite of transports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from tests.conformance.test_transports import BrokersClock

from oncely.testing import TransportConformance
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport


class TestKafka(TransportConformance):
    """The suite on Kafka, with topics of one partition."""

    @pytest.fixture
    def clock(self) -> BrokersClock:
        return BrokersClock()

    @pytest.fixture
    def connect(self, kafka_url: str) -> Iterator[Callable[[], Transport]]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(closing(open_transport(kafka_url)))
