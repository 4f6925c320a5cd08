"""``megatrain`` and ``megatrain-ckpt`` on the PATH of a shell, that start at once.

Beside them is ``call``, for what needs the same imports: ``call module:function ARGUMENT...``.

One process has imported everything; what the shell starts is a small client that asks it to fork.
The forked process has the client's arguments, folder, environment and files. Signals reach it,
it dies if its client is killed, and the client ends as it ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.support.children import COMMANDS, MODULES, exit_status, prepare

_CALL = "call"
_CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = [[{name!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ)]
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
pid = int(server.recv(20))
for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = server.recv(20)
if not code:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code))
"""


@contextmanager
def quick_commands(folder: Path) -> Iterator[Path]:
    """Lend a folder for the front of a PATH; ``folder`` is for what belongs to it."""
    address = folder / "socket"
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in (*COMMANDS, _CALL):
        text = _CLIENT.format(python=sys.executable, address=str(address), name=name)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.quick_commands", str(address)],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n"
        yield programs
    finally:
        server.terminate()
        server.communicate()


def _serve(address: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what is imported talks
    for module in MODULES:
        importlib.import_module(module)
    prepare()
    gc.collect()
    gc.freeze()  # what the forked processes share stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(answers, b"ready\n")
        os.close(answers)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become(client)
            client.close()


def _become(client: socket.socket) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        data, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
        while not data.endswith(b"\n"):
            data += client.recv(1 << 16)
        command, folder, environment = json.loads(data)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        client.sendall(str(os.getpid()).encode())
        threading.Thread(target=_die_with, args=(client,), daemon=True).start()
        code = exit_status(command[1:] if command[0] == _CALL else command)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        client.sendall(str(code).encode())
    finally:
        os._exit(code)


def _die_with(client: socket.socket) -> None:
    client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(sys.argv[1])
