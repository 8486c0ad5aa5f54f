"""A stand-in for kubectl: it answers from a file, and forwards to ports of this machine.

    {"pods": [...], "secret": {...}, "ports": {"POD:PORT": ["host", 1234]}}

Each that forwards writes its process id to the file's name with .pids.

Words are those of kubectl, and so is what it prints; calls that it does not know fail.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any


def copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(1 << 16):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def forward(listener: socket.socket, place: tuple[str, int]) -> None:
    while True:
        here, _ = listener.accept()
        print(f"Handling connection for {listener.getsockname()[1]}", flush=True)
        try:
            there = socket.create_connection(place)
        except OSError as exc:  # as in a pod in which nothing listens
            print(f"an error occurred forwarding: {exc}", file=sys.stderr, flush=True)
            here.close()
            continue
        for pair in ((here, there), (there, here)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def port_forward(pod: str, ports: list[str], known: dict[str, Any]) -> None:
    threads = []
    for port in (one.removeprefix(":") for one in ports):
        place = known.get(f"{pod}:{port}")
        if place is None:
            sys.exit("error: unable to forward port because pod is not running.")
        listener = socket.create_server(("127.0.0.1", 0))
        print(f"Forwarding from 127.0.0.1:{listener.getsockname()[1]} -> {port}", flush=True)
        threads.append(
            threading.Thread(None, forward, args=(listener, tuple(place)), daemon=True)
        )
        threads[-1].start()
    with Path(f"{os.environ['KUBECTL_STAND_IN']}.pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    for one in threads:
        one.join()


def main() -> None:
    state = json.loads(Path(os.environ["KUBECTL_STAND_IN"]).read_text(encoding="utf-8"))
    options = {word.partition("=")[0]: word for word in sys.argv[1:] if word.startswith("--")}
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if options.get("--namespace", "--namespace=training") != "--namespace=training":
        print(json.dumps({"items": []}))
    elif words == ["get", "pods"] and options["--output"] == "--output=json":
        label = options["--selector"].removeprefix("--selector=persia_job=")
        pods = [
            one for one in state["pods"] if one["metadata"]["labels"]["persia_job"] == label
        ]
        print(json.dumps({"items": pods}))
    elif words[:2] == ["get", "secret"]:
        if words[2] != state["secret"]["metadata"]["name"]:
            sys.exit(f'Error from server (NotFound): secrets "{words[2]}" not found')
        print(json.dumps(state["secret"]))
    elif words[0] == "port-forward":
        port_forward(words[1].removeprefix("pod/"), words[2:], state["ports"])
    else:
        sys.exit(f"unknown command {words}")


if __name__ == "__main__":
    main()
