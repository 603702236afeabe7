"""A way to a server that a test can cut at the moment it chooses."""

import select
import socket
from contextlib import suppress
from threading import Thread
from typing import Self

_HOST = "127.0.0.1"


class Proxy:
    """Passes on what clients and the server at `port` say to one another."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._word = b""
        self._delivers = False
        self._refuses = self._refuses_then = 0
        self._listener = socket.create_server((_HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0
        """How many connections were cut."""

    def cut(self, word: bytes, *, delivers: bool, refuses: int = 0) -> None:
        """Cut the connection of the next request that holds `word`.

        Where it `delivers`, the server gets the request, and its reply is dropped. The server is
        away then: so many new connections after that are cut as well.
        """
        self._word, self._delivers, self._refuses_then = word, delivers, refuses

    def __enter__(self) -> Self:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Ends the accept that waits; to close alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refuses:
                    self._refuses -= 1
                    client.close()
                    continue
                Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        address = (_HOST, self._server_port)
        with suppress(OSError), client, socket.create_connection(address) as server:
            self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        is_last = False
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(1 << 16)
                if not data or (is_last and source is server):
                    return
                if source is client and self._word and self._word in data:
                    self._word = b""
                    self.cuts += 1
                    self._refuses = self._refuses_then
                    if not self._delivers:
                        return
                    is_last = True
                (server if source is client else client).sendall(data)
