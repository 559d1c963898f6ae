#!/usr/bin/env python3
"""Benchmarks of a real deployment: how long the KV of a 2,000-token prompt travels, and what idling costs.

    scripts/bench_serving.py TOWLINE MODEL [--prompts N] [--idle SECONDS]

Starts `towline up` once for each transport, sends N different prompts through the router, and prints JSON lines: the
median and the extremes of each receipt's seconds, then the processor share of the whole process tree over an idle
window. Only loopback is used; everything started here is stopped here.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

WORDS = "harbour tide rope sail anchor chart wind star buoy keel mast deck oar net fog bell light shore reef".split()


def main():
    args = parse_args()
    for transport in ["shm", "tcp"]:
        with Deployment(args.towline, args.model, transport) as deployment:
            print_line(kv_pull(deployment, transport, args.prompts))
            if transport == "tcp":
                print_line(idle(deployment, args.idle))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("towline")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--idle", type=float, default=30.0)
    return parser.parse_args()


def print_line(figures):
    print(json.dumps(figures), flush=True)


class Deployment:
    """A running `towline up`."""

    def __init__(self, towline, model, transport):
        command = [
            towline,
            "up",
            "--model",
            model,
            "--transport",
            transport,
            "--listen",
            "127.0.0.1:0",
            "--format",
            "json",
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.PIPE, text=True
        )
        self.url = next(url for url in map(url_of, self.process.stdout) if url)
        with urllib.request.urlopen(self.url + "/v1/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)

    def ask(self, prompt):
        """One request; its usage."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        headers = {"Content-Type": "application/json", "X-Towline-Receipt": "1"}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["usage"]

    def cpu_seconds(self):
        """Processor time of the process and its children so far."""
        own = self.process.pid
        children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == own]
        return sum(cpu_of(pid) for pid in [own, *children])


def url_of(line):
    at = line.find("http://")
    return line[at:].split('"')[0].split()[0].rstrip("/") if at >= 0 else None


def stat_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(") ", 1)[1].split()


def parent_of(pid):
    try:
        return int(stat_of(pid)[1])
    except OSError:
        return None


def cpu_of(pid):
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompt(seed, words=1660):
    """About a token a word, another text for every seed, so that no prefix cache helps."""
    return " ".join(WORDS[(seed * 7 + i * i + i * seed) % len(WORDS)] for i in range(words))


def kv_pull(deployment, transport, prompts):
    receipts = []
    for seed in range(1, prompts + 2):
        usage = deployment.ask(f"{seed} " + prompt(seed))
        receipts.append(usage["towline_receipt"])
    receipts = receipts[1:]  # the first connects
    seconds = sorted(receipt["seconds"] for receipt in receipts)
    return {
        "bench": "kv-pull",
        "transport": transport,
        "prompt_tokens": usage["prompt_tokens"],
        "bytes": receipts[-1]["bytes"],
        "blocks": receipts[-1]["blocks"],
        "p50_ms": round(statistics.median(seconds) * 1e3, 2),
        "min_ms": round(seconds[0] * 1e3, 2),
        "max_ms": round(seconds[-1] * 1e3, 2),
        "verify_p50_ms": round(
            statistics.median(receipt["timings"]["verify_s"] for receipt in receipts) * 1e3, 2
        ),
    }


def idle(deployment, seconds):
    before, began = deployment.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    share = (deployment.cpu_seconds() - before) / (time.monotonic() - began)
    return {
        "bench": "idle",
        "processes": "up, router, prefill, decode",
        "seconds": seconds,
        "cores": round(share, 5),
    }


if __name__ == "__main__":
    sys.exit(main())
