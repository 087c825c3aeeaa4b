"""The console as a process: it says where it is, answers there, and ends when it is told to."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from geneva.console import serve
from geneva.errors import UserInputError


@pytest.mark.slow
def test_it_says_where_it_listens_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    code = f"from geneva.console import serve; serve({str(tmp_path / 'db')!r}, port=0)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = line.split()[1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=20) as answer:
                assert b"There is no table" in answer.read()
            other = urllib.request.Request(address, headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="421") as refused:
                urllib.request.urlopen(other, timeout=20)
            refused.value.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.slow
def test_machines_are_told_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    command = ["-m", "geneva.cli", "console", str(tmp_path / "db"), "--port", "0", "--json"]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            document = ""
            while not document.endswith("}\n"):
                document += process.stdout.readline()
            told = json.loads(document)
            assert told["database"] == str(tmp_path / "db")
            with urllib.request.urlopen(told["console"], timeout=20) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()


def test_a_port_that_is_taken_is_said_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserInputError, match=f"port {port}"):
            serve(str(tmp_path / "db"), port=port)
