"""Attacks on the pre-flight's port, for tests/preflight.rs: what somebody without the
launch's secret may send. Written from the description in act/preflight/wire.rs, not
with its code.

    attack.py MANNER HOST PORT SECONDS [FILE]

A first line says that it has begun; the last one tells what came of it. `proofs` are
connections on which the server took us for a node of the launch: there must be none.
"""

import hashlib
import hmac
import os
import random
import resource
import select
import socket
import sys
import time

MANNER, HOST, PORT, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
FILE = sys.argv[5] if len(sys.argv) > 5 else None
MAGIC, GREETING, REPLY = b"palingenesis", 46, 82
END = time.monotonic() + SECONDS


def connect():
    connection = socket.socket()
    connection.settimeout(2)
    connection.connect((HOST, PORT))
    return connection


def receive(connection, length):
    got = b""
    while len(got) < length:
        part = connection.recv(length - len(got))
        if not part:
            break
        got += part
    return got


def tag(key, *parts):
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()


def answer(connection):
    """Whether the server answers with more than silence and an end."""
    try:
        return receive(connection, 1) != b""
    except OSError:
        return False


def wrong_key(connection, turn):
    greeting = receive(connection, GREETING)
    head = MAGIC + greeting[12:14] + (turn % 5).to_bytes(4, "big") + os.urandom(32)
    # Keys that a hasty program would have: none, zeros, the public random number.
    key = [b"", bytes(32), greeting[14:], os.urandom(32)][turn % 4]
    connection.sendall(head + tag(key, b"client", greeting, head))
    return answer(connection)


def replay(connection, turn):
    receive(connection, GREETING)
    connection.sendall(RECORDED)
    return answer(connection)


def reflect(connection, turn):
    greeting = receive(connection, GREETING)
    connection.sendall((greeting * 2)[:REPLY])
    return answer(connection)


def garbage(connection, turn):
    if turn % 2:
        receive(connection, GREETING)
    size = random.choice([1, 13, REPLY - 1, REPLY, REPLY + 1, 5000, 1000000])
    head = random.choice([b"", MAGIC, MAGIC + b"\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 46])
    connection.sendall((head + os.urandom(size))[:size])
    return turn % 2 == 1 and answer(connection)


def again_and_again(attack):
    print("ready", flush=True)
    turns = proofs = refused = 0
    while time.monotonic() < END:
        try:
            with connect() as connection:
                proofs += attack(connection, turns)
        except ConnectionRefusedError:
            # Before the server is there, and after it.
            refused += 1
            time.sleep(0.02)
            continue
        except OSError:
            pass
        turns += 1
    print(f"turns {turns} proofs {proofs}", flush=True)


def flood(count=10000):
    """Ten thousand connections that say nothing, as many of them open as the server lets."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
    print("ready", flush=True)
    done, open_now, proofs = 0, [], 0
    while done < count and time.monotonic() < END:
        connection = socket.socket()
        connection.setblocking(False)
        try:
            connection.connect((HOST, PORT))
        except BlockingIOError:
            pass
        except OSError:
            time.sleep(0.01)
            continue
        open_now.append(connection)
        done += 1
        if done % 100 == 0:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            poll.poll(200)
    time.sleep(max(0, END - time.monotonic()))
    print(f"turns {done} proofs {proofs}", flush=True)


def record():
    """A relay to the true server, that keeps what the clients say (FILE) and what the
    server says (FILE.server)."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", PORT))
    listener.listen(16)
    print("ready", flush=True)
    other, files = {}, {}
    while time.monotonic() < END:
        for ready in select.select([listener, *other], [], [], 0.1)[0]:
            if ready is listener:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection((HOST, PORT), 1)
                except OSError:
                    client.close()
                    continue
                other[client], other[server] = server, client
                files[client], files[server] = open(FILE, "wb"), open(FILE + ".server", "wb")
                continue
            try:
                data = ready.recv(65536)
                files[ready].write(data)
                files[ready].flush()
                if data:
                    other[ready].sendall(data)
                    continue
            except OSError:
                pass
            for end in (ready, other[ready]):
                end.close()
                other.pop(end, None)
    print("turns 1 proofs 0", flush=True)


def pose():
    """Listens in the server's place, and says what a true server said to another launch."""
    said = open(FILE + ".server", "rb").read()
    listener = socket.socket()
    listener.bind(("0.0.0.0", PORT))
    listener.listen(16)
    listener.settimeout(0.2)
    print("ready", flush=True)
    turns, kept = 0, []
    while time.monotonic() < END:
        try:
            client, _ = listener.accept()
        except OSError:
            continue
        kept.append(client)
        turns += 1
        try:
            client.sendall(said)
        except OSError:
            pass
    # What a client says after the reply would be said to a server it trusts.
    proofs = 0
    for client in kept:
        client.settimeout(0.2)
        try:
            proofs += len(receive(client, 100000)) > REPLY
        except OSError:
            pass
    print(f"turns {turns} proofs {proofs}", flush=True)


if MANNER == "flood":
    flood()
elif MANNER == "record":
    record()
elif MANNER == "pose":
    pose()
else:
    if MANNER == "replay":
        RECORDED = open(FILE, "rb").read()
    again_and_again({"wrong-key": wrong_key, "replay": replay, "reflect": reflect, "garbage": garbage}[MANNER])
