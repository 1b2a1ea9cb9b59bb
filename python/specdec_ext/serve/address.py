"""Can a server listen there? Asked before a model is loaded, which takes longer than the answer.

    python -m specdec_ext.serve.address HOST PORT

ends with 0, or says why not on stderr.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from pathlib import Path

from ..errors import ConfigError, SpecdecError

__all__ = ["check_address", "check_socket_path"]

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_address(host: str, port: int) -> None:
    """Raise ConfigError unless a server can listen on the port, of all addresses of the host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; give an address of this machine"
        ) from None
    missing = 0
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As the server's own: connections that have just ended do not keep the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            # A name may have an address more than this machine has, or of a family that it has not.
            if error.errno in _NOT_HERE and (missing := missing + 1) < len(found):
                continue
            raise ConfigError(_refusal(host, port, error)) from None


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port {port}: another process listens on {host}:{port}; end it, or choose another "
            "port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address; 0.0.0.0 means all that it has"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"--port {port}: this user may not listen there; choose one from 1024 on"
    return f"--host {host} --port {port}: {error.strerror or error}; choose another address"


def check_socket_path(path: str) -> None:
    """Raise ConfigError unless a server can listen on a Unix socket of this path.

    A socket that nobody listens on any more is replaced; one that is in use would be, too, and its
    server never be asked again.
    """
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ConfigError(f"--uds {path}: there is no such folder; make it first")
    try:
        if not stat.S_ISSOCK(os.stat(place).st_mode):
            raise ConfigError(f"--uds {path}: exists and is no socket; choose another name")
    except FileNotFoundError:
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:  # the path is too long, or not ours
            raise ConfigError(
                f"--uds {path}: {error.strerror or error}; choose another path"
            ) from None
    raise ConfigError(f"--uds {path}: another process listens there; end it, or take another")


if __name__ == "__main__":
    try:
        check_address(sys.argv[1], int(sys.argv[2]))
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
