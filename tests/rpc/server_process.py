"""A parameter server in a process of its own, for tests that stop or kill it.

    python -m tests.rpc.server_process ADDRESS SILENCE_S

Prints its address once it serves, and ends with its standard input.
"""

from __future__ import annotations

import sys

from persia._rpc.methods import parameter_server
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport
from tests.support.services import make_servers


def main() -> None:
    address, silence_s = sys.argv[1], float(sys.argv[2])
    transport = ZmqTransport(silence_s=silence_s)
    server = serve(transport, address, parameter_server(), make_servers(1)[0])
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()
    transport.close()


if __name__ == "__main__":
    main()
