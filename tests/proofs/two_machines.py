"""Training over two machines, which are two network namespaces of this one.

    sudo python tests/proofs/two_machines.py

Plain torch and Lightning by torchrun, Accelerate by its launcher: replicas on two machines are
bit-identical and equal one machine with as many processes. Then torchrun with ``--nnodes 1:2``: a
worker is killed and its machine goes, and the other goes on alone from the last checkpoint, to the
bits of a run that nothing happened to. Exits with 1 where anything differs. Needs root and
Linux, to make the namespaces; they are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = Path(__file__).with_name("two_machines_worker.py")
NAMES = [f"bf16-{os.getpid()}-{n}" for n in (0, 1)]
CARDS = [f"bf{os.getpid()}h{n}" for n in (0, 1)]
ADDRESSES = ["10.213.7.1", "10.213.7.2"]
WAYS = ("torch", "lightning", "accelerate")
# Namespaces of their own: nobody else is there.
PORT, BOUND = "29500", 180


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_hosts() -> None:
    for name in NAMES:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1])
    for name, card, address in zip(NAMES, CARDS, ADDRESSES, strict=True):
        ip("link", "set", card, "netns", name)
        ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
        ip("-n", name, "link", "set", card, "up")


def remove_hosts() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def start(host: int, command: list[str], log: Path) -> subprocess.Popen:
    """A command on one of the hosts, in a session of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "BF16_"))}
    variables = {**kept, "GLOO_SOCKET_IFNAME": CARDS[host], "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        return subprocess.Popen(
            ["ip", "netns", "exec", NAMES[host], sys.executable, "-m", *command],
            env=variables,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def torchrun(host: int, hosts: int, processes: int) -> list[str]:
    return [
        *("torch.distributed.run", "--nnodes", str(hosts), "--node-rank", str(host)),
        *("--nproc-per-node", str(processes), "--master-addr", ADDRESSES[0]),
        *("--master-port", PORT),
    ]


def accelerate(host: int, hosts: int, processes: int) -> list[str]:
    return [
        *("accelerate.commands.launch", "--multi_gpu", "--num_machines", str(hosts)),
        *("--machine_rank", str(host), "--num_processes", str(hosts * processes)),
        *("--main_process_ip", ADDRESSES[0], "--main_process_port", PORT),
        *("--rdzv_backend", "static", "--mixed_precision", "bf16-fp32-master"),
    ]


def stop(process: subprocess.Popen) -> None:
    """End a launcher, and its workers, whose sessions are their own, by asking it to end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def trained(way: str, hosts: int, processes: int, folder: Path) -> list[dict]:
    """What each rank of a run ended with."""
    folder.mkdir()
    launch = accelerate if way == "accelerate" else torchrun
    logs = [folder / f"{host}.log" for host in range(hosts)]
    running = [
        start(host, [*launch(host, hosts, processes), str(WORKER), way, str(folder)], logs[host])
        for host in range(hosts)
    ]
    try:
        codes = [each.wait(BOUND) for each in running]
    finally:
        for each in running:
            stop(each)
    if any(codes):
        raise SystemExit("\n".join([way, *(log.read_text()[-3000:] for log in logs)]))
    return [json.loads(each.read_text()) for each in sorted(folder.glob(f"{way}-*.json"))]


def compare(way: str, folder: Path) -> bool:
    two = trained(way, 2, 1, folder / f"{way}-two")
    one = trained(way, 1, 2, folder / f"{way}-one")
    digests = {each["digest"] for each in two + one}
    hosts = {each["host"] for each in two}
    same = len(two) == len(one) == len(hosts) == 2 and len(digests) == 1
    print(f"{way}: {len(hosts)} hosts, {len(digests)} different ends of {len(two + one)} ranks")
    return same


def elastic(folder: Path) -> bool:
    """Two hosts, one of which is lost with its worker; the other restarts alone and ends."""
    expected = trained("elastic", 1, 1, folder / "whole")
    folder = folder / "elastic"
    folder.mkdir()
    logs = [folder / "0.log", folder / "1.log"]
    options = [
        *("torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *(
            "--rdzv-endpoint",
            f"{ADDRESSES[0]}:{PORT}",
        ),
    ]
    running = []
    try:
        for host in (0, 1):
            conf = f"is_host={int(host == 0)},last_call_timeout=15"
            local = ["--local-addr", ADDRESSES[host], "--rdzv-conf", conf]
            command = [*options, *local, str(WORKER), "elastic", str(folder)]
            running.append(start(host, command, logs[host]))
            time.sleep(2)  # the first one is where they meet
        code = running[0].wait(BOUND)
    finally:
        for each in running:
            stop(each)
    if code:
        raise SystemExit("\n".join(log.read_text()[-3000:] for log in logs))
    found = json.loads((folder / "elastic-0.json").read_text())
    seen = [json.loads(line) for line in (folder / "lives").read_text().splitlines()]
    worlds = [each["world"] for each in seen]
    went_on = seen[-1]["first"] > 0 and worlds == [2, 2, 1]
    same = found["digest"] == expected[0]["digest"]
    print(
        f"elastic: worlds {worlds}, went on from step {seen[-1]['first']}, "
        f"{'the same bits' if same else 'OTHER BITS'}"
    )
    return same and went_on


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    # As an exception, which ends what was started and removes the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        make_hosts()
        with tempfile.TemporaryDirectory() as folder:
            held = [compare(way, Path(folder)) for way in WAYS]
            held.append(elastic(Path(folder)))
    finally:
        remove_hosts()
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
