"""What torch's TCPStore takes for the pre-flight's work: N nodes connect, each hands over
4 KiB, and all wait for a word that rank 0 says when it has them all.

    tcpstore.py N [PROCESSES]     seconds, from "all start" to "all have the word"

The clients share PROCESSES processes (default 8); in each, one thread goes from client to
client: what is said while a client before it is served costs the later one nothing, and no
thread has to be woken. Exit code 77: no torch.
"""

import os
import sys
import time

try:
    from datetime import timedelta

    from torch.distributed import TCPStore
except ImportError as error:
    print(f"tcpstore: skipped: {error}", file=sys.stderr)
    sys.exit(77)

REPORT = b"x" * 4096
TIMEOUT = timedelta(seconds=300)


def clients(ranks, world, port, start, end):
    os.read(start, 1)
    stores = []
    for rank in ranks:
        store = TCPStore("127.0.0.1", port, world, False, TIMEOUT, False)
        store.set(f"report{rank}", REPORT)
        stores.append(store)
    for store in stores:
        assert store.get("go") == b"go"
    os.write(end, f"{time.monotonic()}\n".encode())
    # Everybody's time is taken first.
    os.read(start, 1)
    os._exit(0)


def main():
    world = int(sys.argv[1])
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    port = 20000 + os.getpid() % 10000
    ends, end = os.pipe()
    starts = []
    for index in range(processes):
        start, begin = os.pipe()
        if os.fork() == 0:
            clients(range(1 + index, world, processes), world, port, start, end)
        starts.append(begin)
    # Before the clients: one that is refused comes again after a second only.
    store = TCPStore("127.0.0.1", port, world, True, TIMEOUT, False)
    began = time.monotonic()
    for begin in starts:
        os.write(begin, b"!")
    store.set("report0", REPORT)
    store.wait([f"report{rank}" for rank in range(world)])
    store.set("go", "go")
    times = b""
    while times.count(b"\n") < processes:
        times += os.read(ends, 4096)
    for begin in starts:
        os.write(begin, b"!")
    for _ in range(processes):
        os.wait()
    print(max(map(float, times.split())) - began)


main()
