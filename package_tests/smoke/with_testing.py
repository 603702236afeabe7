"""The suite for transports, under pytest."""

import subprocess
import sys
from pathlib import Path

SUITE = """
import pytest
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock, TransportSuite
from oncely.transports.store_transport import StoreTransport


class TestMyTransport(TransportSuite):
    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def connect(self, clock):
        store = MemoryStore(clock)
        return lambda: StoreTransport(store)
"""

Path("test_mine.py").write_text(SUITE)
subprocess.run([sys.executable, "-m", "pytest", "-q", "test_mine.py"], check=True, timeout=120)
