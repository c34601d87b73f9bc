#!/usr/bin/env bash
# TCPStore: does a process that connects to 127.0.0.1 ask a name server, and what does it take if none answers?
# A good guess says: no and nothing. The address is a number, it is the machine's own, and /etc/hosts names it.
# Seen: two questions for 1.0.0.127.in-addr.arpa for each connection, one by the client and one by the server. With a
# name server that is silent, a connection takes 10 s. The socket is IPv6, so the address is ::ffff:127.0.0.1, which
# the line "127.0.0.1 localhost" does not name. The host "localhost", or a line in /etc/hosts for ::ffff:127.0.0.1, asks
# nothing, and RES_OPTIONS of glibc shortens the waiting.
# Needs unshare of util-linux and the right to a mount and network namespace of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" 2>/dev/null
cd "$folder"
cat >ask.py <<'PY'
import socket
import threading
import time

from torch.distributed import TCPStore

asked, answering = [], True
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))


def name_server():
    """Answers each question with: no such name."""
    while True:
        question, peer = server.recvfrom(512)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += 1 + question[at]
        asked.append(".".join(labels))
        if answering:
            server.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12 : at + 5], peer)


def count(what, connect):
    time.sleep(0.5)
    asked.clear()
    began = time.monotonic()
    connection = connect()
    seconds = time.monotonic() - began
    time.sleep(0.5)
    waited = "10 s" if 9 < seconds < 14 else "1 s" if 0.9 < seconds < 3 else "at once"
    print(f"{what}: {len(asked)} questions {sorted(set(asked))}, {waited}", flush=True)
    return connection


threading.Thread(target=name_server, daemon=True).start()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
plain = socket.create_server(("127.0.0.1", 0))
count("a plain socket to 127.0.0.1", lambda: socket.create_connection(plain.getsockname()))
count("TCPStore to 127.0.0.1", lambda: TCPStore("127.0.0.1", store.port, is_master=False))
count("TCPStore to localhost", lambda: TCPStore("localhost", store.port, is_master=False))
answering = False
count("TCPStore to 127.0.0.1, silent server", lambda: TCPStore("127.0.0.1", store.port, is_master=False))
with open("hosts", "a") as file:
    file.write("::ffff:127.0.0.1 localhost\n")
count("the same, named in /etc/hosts", lambda: TCPStore("127.0.0.1", store.port, is_master=False))
PY
cat >namespace.sh <<'SH'
set -e
python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH", b"lo", 0x49))'
echo "nameserver 127.0.0.1" >resolv
names="127.0.0.1 localhost\n::1 localhost\n"
printf "$names" >hosts
echo "hosts: files dns" >switch
mount --bind resolv /etc/resolv.conf
mount --bind hosts /etc/hosts
mount --bind switch /etc/nsswitch.conf
venv/bin/python ask.py
printf "$names" >hosts
RES_OPTIONS="timeout:1 attempts:1" venv/bin/python ask.py | sed -n "s/silent server/one try of a second/p"
SH
venv/bin/python -c 'import torch, platform; print("torch", torch.__version__, "python", platform.python_version())'
echo "A good guess: 0 questions and at once, six times."
unshare --map-root-user --user --mount --net bash namespace.sh 2>errors | tee seen
diff - seen <<'SEEN'
a plain socket to 127.0.0.1: 0 questions [], at once
TCPStore to 127.0.0.1: 2 questions ['1.0.0.127.in-addr.arpa'], at once
TCPStore to localhost: 0 questions [], at once
TCPStore to 127.0.0.1, silent server: 2 questions ['1.0.0.127.in-addr.arpa'], 10 s
the same, named in /etc/hosts: 0 questions [], at once
TCPStore to 127.0.0.1, one try of a second: 1 questions ['1.0.0.127.in-addr.arpa'], 1 s
SEEN
