"""How fast a request reaches many agents: simulated clients of the real protocol, one controller.

    python benchmarks/reach.py [--agents 10 100 1250 10000] [--json FILE]

The controller is a launcher's (`haiprof.agent.reach_controller`), in a process of its own; the
agents are connections of one other process, on the same cores. Measured from the moment the
controller's tick hands the request over: until the last agent has it, and until the last reply is
back. A launcher's tick, at the most 0.5 s before and after, comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path

from haiprof.agent.reach_controller import Controller
from haiprof.agent.reach_uplink import (
    AGENT,
    ANSWER_BYTES,
    CONTROLLER,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    Handshake,
    new_nonce,
    seal,
)

KEY = b"k" * 32
REPLY = json.dumps({"id": "a", "reply": {"name": "0", "state": "done", "rank": 0}}).encode()
REQUEST = {
    "id": "a",
    "kind": "trace",
    "arguments": {"count": 5},
    "expires_wall_ns": 1,
    "ranks": None,
}


async def agent(address, number, arrived, limit):
    async with limit:
        # As on a real network, where each node has an address of its own.
        own = f"127.1.{number >> 8}.{number & 255}"
        reader, writer = await asyncio.open_connection(*address, local_addr=(own, 0))
        nonce = new_nonce()
        writer.write(MAGIC + nonce)
        answer = await reader.readexactly(ANSWER_BYTES)
        handshake = Handshake(key=KEY, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES])
        assert handshake.is_proof(CONTROLLER, answer[NONCE_BYTES:])
        writer.write(handshake.proof(AGENT))
        await writer.drain()
    framed = await reader.readexactly(LENGTH.size)
    framed += await reader.readexactly(*LENGTH.unpack(framed))
    signature = await reader.readexactly(SIGNATURE_BYTES)
    assert handshake.signer(CONTROLLER).is_next(framed, signature)
    arrived.append(time.perf_counter())
    writer.write(seal(REPLY, handshake.signer(AGENT)))
    await writer.drain()
    await reader.read(1)  # until the controller goes
    writer.close()


async def agents(address, count, pipe):
    arrived: list[float] = []
    limit = asyncio.Semaphore(500)
    tasks = [asyncio.create_task(agent(address, i, arrived, limit)) for i in range(count)]
    while len(arrived) < count:
        await asyncio.sleep(0.01)
    pipe.send(max(arrived))
    await asyncio.gather(*tasks, return_exceptions=True)


def clients(address, count, pipe):
    asyncio.run(agents(address, count, pipe))


def measure(count: int) -> dict[str, float]:
    controller = Controller("127.0.0.1", 0, KEY)
    controller.start()
    here, there = multiprocessing.Pipe()
    began = time.perf_counter()
    process = multiprocessing.get_context("fork").Process(
        target=clients, args=(controller.address, count, there)
    )
    process.start()
    while controller.agent_count < count:
        time.sleep(0.002)
    connected = time.perf_counter() - began
    cpu = time.process_time()
    sent = time.perf_counter()
    controller.broadcast(REQUEST)
    taken = 0
    while taken < count:
        if controller.take() is None:
            time.sleep(0.002)
        else:
            taken += 1
    answered = time.perf_counter() - sent
    arrived = here.recv() - sent
    cpu = time.process_time() - cpu
    controller.stop()
    process.join(20)
    process.kill()
    return {
        "agents": count,
        "connect_s": connected,
        "request_s": arrived,
        "replies_s": answered,
        "controller_cpu_s": cpu,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1250, 5000, 9500])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [measure(count) for count in options.agents]
    print("agents  connected  request there  replies back  controller cpu  rss MB")
    for row in rows:
        print(
            f"{row['agents']:6d}  {row['connect_s']:8.2f} s  {row['request_s'] * 1e3:10.0f} ms"
            f"  {row['replies_s'] * 1e3:9.0f} ms  {row['controller_cpu_s'] * 1e3:11.0f} ms"
            f"  {row['rss_mb']:6.0f}"
        )
    print(
        f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; file limit {soft}"
    )
    if options.json:
        content = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
