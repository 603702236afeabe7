"""The servers that tests start."""

import socket
import threading

import pytest
from tests.servers import HOST, Rabbitmq


@pytest.mark.usefixtures("rabbitmq")
def test_another_has_the_port() -> None:
    """RabbitMQ starts elsewhere where another server has the port of its epmd."""
    server = Rabbitmq()
    first = server.port
    with socket.create_server((HOST, first + 2)) as other:

        def answer() -> None:
            while True:
                try:
                    asking, _ = other.accept()
                except OSError:
                    return
                with asking:
                    asking.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with server:
            assert server.port != first
            assert "oncely" in server.evaluate("node()")
        other.shutdown(socket.SHUT_RDWR)
