#!/usr/bin/env python3
"""Towline beside NIXL, Mooncake and the machine's own limits, in one run, taking turns.

    scripts/bench_peers.py PEERS_FOLDER TOWLINE [--pairs 15] [--cases CASE,...] [--peers PEER,...] [--out FILE]

PEERS_FOLDER holds nixl_peer.py, mooncake_peer.py, common.py and limits.c; TOWLINE is the binary. A pair is one run of
everybody, one after the other (A B A B), so that whatever else the machine does meets all alike. What is compared is
within a pair: the ratio of two medians of a few repetitions. Of the ratios of all pairs the median is told, with its
exact interval of at least 95 %: two order statistics, by the sign test, whatever the distribution.

A bar "at least" is met when the lower end of the interval meets it, a bar "at most" when the upper end does. The
denominator of a share is the larger of Towline's own limit and that of limits.c in the same pair, both at the median,
like the figure that is divided; beside it stands the share of the best round of either, which is stricter than noise
allows. NIXL's best is the best of its configurations in that pair, all with pages of the size that Towline has.

What is installed (NIXL and Mooncake, from PyPI, each into an environment of its own under --cache) is said first.
Nothing is skipped silently: what is missing ends the run, unless --peers leaves it out. JSON lines go to --out.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

MIB = 1 << 20
SIZE_MIB = 256
# As run.sh installs them: without dependencies, NIXL's wheel brings neither torch nor CUDA.
PACKAGES = {"nixl": ["--no-deps", "nixl-cu12", "numpy"], "mooncake": ["mooncake-transfer-engine-non-cuda", "numpy"]}
MODULES = {"nixl": "nixl_cu12", "mooncake": "mooncake.engine"}
SCRIPTS = {"limits": "limits.c", "nixl": "nixl_peer.py", "mooncake": "mooncake_peer.py"}
# Seconds for one run of one participant: the slowest takes about 30.
PATIENCE = 300
# Case: its wire, the bytes of a block (0: one piece), and Towline's copy threads.
CASES = {
    "shm-1": ("shm", 0, 1),
    "shm-2": ("shm", 0, 2),
    "shm-64k-1": ("shm", 65536, 1),
    "shm-64k-2": ("shm", 65536, 2),
    "shm-4k-1": ("shm", 4096, 1),
    "shm-4k-2": ("shm", 4096, 2),
    "tcp": ("tcp", 0, 2),
    "tcp-64k": ("tcp", 65536, 2),
    "tcp-4k": ("tcp", 4096, 2),
    "shm-one-4k": ("shm", None, 1),
    "tcp-one-4k": ("tcp", None, 1),
}
# NIXL's configurations by wire; the first is as shipped, the others are candidates for its best.
NIXL = {
    "shm": [
        ("nixl", []),
        ("nixl, no progress thread", ["--no-progress-thread"]),
        # Not a candidate: other pages than Towline's, so it is told beside, by a name of its own.
        ("huge pages: nixl, no progress thread", ["--no-progress-thread", "--huge"]),
        ("nixl, posix,cma,self", ["--err", "none", "--tls", "posix,cma,self"]),
        ("nixl, posix,self", ["--err", "none", "--tls", "posix,self"]),
    ],
    "tcp": [
        ("nixl", ["--tls", "tcp"]),
        ("nixl, no progress thread", ["--tls", "tcp", "--no-progress-thread"]),
    ],
}
MOONCAKE = "mooncake, 1024 a call"
# What Towline must reach: a name, the case, what it is divided by, the sense, the bar (None: only reported).
BARS = [
    ("shm, one piece, 1 thread, of the limit", "shm-1", "limit shm-1", ">=", 0.95),
    ("shm, one piece, 2 threads, of the 1-thread limit", "shm-2", "limit shm-1", ">=", 1.6),
    ("shm, one piece, times NIXL's best", "shm-2", "nixl", ">=", 2.2),
    ("shm, one piece, times NIXL's with huge pages", "shm-2", "huge pages", ">=", None),
    ("shm, 64 KiB pages, 1 thread, of the limit", "shm-64k-1", "limit shm-64k-1", ">=", 0.95),
    ("shm, 64 KiB pages, 2 threads, of the limit", "shm-64k-2", "limit shm-64k-2", ">=", 0.95),
    ("shm, 64 KiB pages, times NIXL's best", "shm-64k-2", "nixl", ">=", None),
    ("shm, 4 KiB pages, 1 thread, of the limit", "shm-4k-1", "limit shm-4k-1", ">=", 0.9),
    ("shm, 4 KiB pages, 2 threads, of the limit", "shm-4k-2", "limit shm-4k-2", ">=", 0.9),
    ("shm, 4 KiB pages, times NIXL's best", "shm-4k-2", "nixl", ">=", 2.5),
    ("shm, 4 KiB pages, times NIXL's with huge pages", "shm-4k-2", "huge pages", ">=", None),
    ("tcp, one piece, of the limit", "tcp", "limit tcp", ">=", 0.9),
    ("tcp, one piece, times NIXL's best", "tcp", "nixl", ">=", None),
    ("tcp, one piece, times Mooncake", "tcp", "mooncake", ">=", None),
    ("tcp, 64 KiB pages, of the limit", "tcp-64k", "limit tcp-64k", ">=", 0.85),
    ("tcp, 64 KiB pages, times NIXL's best", "tcp-64k", "nixl", ">=", None),
    ("tcp, 64 KiB pages, times Mooncake", "tcp-64k", "mooncake", ">=", None),
    ("tcp, 4 KiB pages, of the limit", "tcp-4k", "limit tcp-4k", ">=", 0.85),
    ("tcp, 4 KiB pages, times NIXL's best", "tcp-4k", "nixl", ">=", None),
    ("tcp, 4 KiB pages, times Mooncake", "tcp-4k", "mooncake", ">=", None),
    ("shm, one 4 KiB block, p50 in us", "shm-one-4k", "p50_us", "<=", 2.0),
    ("tcp, one 4 KiB block, p50 in us", "tcp-one-4k", "p50_us", "<=", 15.0),
    ("shm, agent ready and first transfer, ms", "shm-one-4k", "start_ms", "<=", 5.0),
    ("tcp, agent ready and first transfer, ms", "tcp-one-4k", "start_ms", "<=", 5.0),
    ("tcp, one piece, CPU s/GB of both sides", "tcp", "cpu_s_per_gb", "<=", 0.75),
]


class Missing(Exception):
    """Something that was asked for is not there; the text says what to do."""


def main():
    args = parse_args()
    try:
        cases = chosen(args.cases, CASES, "case")
        peers = chosen(args.peers, SCRIPTS, "peer")
        bench = Bench(args, peers)
    except Missing as missing:
        print(f"bench_peers: {missing}", file=sys.stderr)
        return 2
    with bench:
        for pair in range(1, args.pairs + 1):
            print(f"pair {pair} of {args.pairs}", file=sys.stderr, flush=True)
            bench.pair(pair, cases)
        found = judge(bench.rows)
        for line in found:
            bench.write(line)
        print(table(bench.rows, found))
    return 0


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers_folder", type=pathlib.Path)
    parser.add_argument("towline", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--reps", type=int, default=3, help="repetitions of each participant within a pair")
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--peers", default=",".join(SCRIPTS), help="of " + ", ".join(SCRIPTS))
    parser.add_argument("--out", type=pathlib.Path, help="file for the JSON lines")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path(home, "towline-peers"))
    return parser.parse_args()


def chosen(words, known, what):
    """The words of a list, all of them known.

    >>> chosen("tcp,shm-1", CASES, "case")
    ['tcp', 'shm-1']
    >>> chosen("tcp,udp", CASES, "case")
    Traceback (most recent call last):
    bench_peers.Missing: no case 'udp'; there are shm-1, shm-2, shm-64k-1, shm-64k-2, shm-4k-1, shm-4k-2, tcp, \
tcp-64k, tcp-4k, shm-one-4k, tcp-one-4k
    """
    found = [word for word in words.split(",") if word]
    for word in found:
        if word not in known:
            raise Missing(f"no {what} {word!r}; there are {', '.join(known)}")
    return found


class Bench:
    """The participants, and what they said."""

    def __init__(self, args, peers):
        self.towline, self.folder, self.reps, self.cache = args.towline, args.peers_folder, args.reps, args.cache
        if not os.access(self.towline, os.X_OK):
            raise Missing(f"{self.towline} is no program: build it with cargo build --release -p towline")
        for peer in peers:
            if not (self.folder / SCRIPTS[peer]).is_file():
                left = ",".join(other for other in peers if other != peer) or "nothing"
                raise Missing(f"no {SCRIPTS[peer]} in {self.folder}: name its folder, or give --peers {left}")
        self.cache.mkdir(parents=True, exist_ok=True)
        self.peers = {peer: install(peer, self.folder, self.cache) for peer in peers}
        self.logs = tempfile.TemporaryDirectory(prefix="bench-peers-")
        self.out = args.out.open("w") if args.out else None
        self.rows = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.logs.cleanup()
        if self.out:
            self.out.close()

    def write(self, line):
        if self.out:
            print(json.dumps(line), file=self.out, flush=True)

    def row(self, pair, who, case, **figures):
        self.rows.append({"kind": "row", "pair": pair, "who": who, "case": case, **figures})
        self.write(self.rows[-1])

    def pair(self, pair, cases):
        """Everybody once, wire by wire."""
        for wire in ["shm", "tcp"]:
            of_wire = [case for case in cases if CASES[case][0] == wire]
            if not of_wire:
                continue
            for case in of_wire:
                self.run_towline(pair, case)
                if "limits" in self.peers:
                    self.run_limits(pair, case)
            if "nixl" in self.peers:
                for who, flags in NIXL[wire]:
                    self.run_peer(pair, (who, "nixl"), of_wire, flags)
            if "mooncake" in self.peers and wire == "tcp":
                self.run_peer(pair, (MOONCAKE, "mooncake"), of_wire, ["--batch", "1024"])

    def lines(self, who, command):
        """The JSON lines that a command prints; what it says besides is shown when it fails."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOWLINE_")}
        environment |= {"TMPDIR": self.logs.name, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [str(word) for word in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            print(f"{who}: nothing within {PATIENCE} s", file=sys.stderr)
            return []
        if done.returncode:
            tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
            print(f"{who}: exit code {done.returncode}: {' '.join(tail)}", file=sys.stderr)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def run_towline(self, pair, case):
        wire, block, threads = CASES[case]
        one = block is None
        command = [self.towline, "bench", "kv", "--config=/dev/null", "--format=json", "--op=read"]
        command += [f"--transport={wire}", f"--copy-threads={threads}", f"--repeat={self.reps}"]
        command += ["--size=4KiB"] if one else [f"--size={SIZE_MIB}MiB"]
        command += [f"--block={block}"] if block else []
        start = {}
        for line in self.lines("towline", command):
            if line["kind"] == "start":
                start = {"start_ms": line["total_ms"]}
            if line["kind"] == "row":
                figures = {name: line[name] for name in ["gb_per_s", "cpu_s_per_gb", "p50_us", "cma_gb_per_s"]}
                limit = {"limit": line["limit"]["gb_per_s_median"], "limit_best": line["limit_gb_per_s"]}
                self.row(pair, "towline", case, **figures, **limit, **start)

    def run_limits(self, pair, case):
        best = None
        for words in limits_of(case, self.reps):
            for line in self.lines("limits", [self.peers["limits"], *words]):
                if "p50_us" in line:
                    self.row(pair, "limits", case, limit_kind="pingpong", p50_us=line["p50_us"])
                elif best is None or line["GBps"] > best["GBps"]:
                    best = line
        if best:
            kind, rates = best["limit"], {"limit": best["GBps"], "limit_best": best["GBps_max"]}
            self.row(pair, "limits", case, limit_kind=kind, **rates, cpu_s_per_gb=best["cpu_s_per_GB"])

    def run_peer(self, pair, participant, cases, flags):
        """A peer's own script, for all cases of a wire: its start costs seconds."""
        (who, peer), blocks = participant, {CASES[case][1] for case in cases}
        paged = ",".join(str(block // 1024) for block in sorted(blocks - {0, None}))
        command = [self.peers[peer], self.folder / SCRIPTS[peer], "--reps", self.reps]
        command += ["--contig", SIZE_MIB if 0 in blocks else 0, "--paged", paged or 0]
        command += ["--lat", 500 if None in blocks else 0, *flags]
        figures = peer_figures(self.lines(who, command))
        for case in cases:
            nothing = figures.get("all", {"error": "it said nothing of this case"})
            self.row(pair, who, case, **figures.get(CASES[case][1], nothing))


def install(peer, folder, cache):
    """What runs a peer: a program built from its source, or the Python of an environment with its package."""
    if peer == "limits":
        program, source = cache / "limits", folder / SCRIPTS[peer]
        if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
            prepare(peer, ["cc", "-O2", "-pthread", source, "-o", program])
        return program
    program, done = cache / peer / "bin" / "python", cache / peer / "installed"
    if not done.exists():
        prepare(peer, [sys.executable, "-m", "venv", "--clear", cache / peer])
        prepare(peer, [program, "-m", "pip", "-q", "install", *PACKAGES[peer]])
        done.touch()
    tried = subprocess.run([program, "-c", f"import {MODULES[peer]}"], capture_output=True, text=True)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason"])[-1]
        raise Missing(f"{peer} is installed and doesn't start ({why}); --peers can leave it out")
    return program


def prepare(peer, command):
    """Says a step of an installation, and does it."""
    print("installing:", *command, file=sys.stderr, flush=True)
    try:
        subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"{peer} can't be installed ({error}); --peers can leave it out")


def limits_of(case, reps):
    """The calls of limits.c that bound a case from above, or, for one block, show what a round trip takes.

    >>> limits_of("shm-4k-1", 3)
    [['memfd', 268435456, 4096, 0, 3], ['paged', 268435456, 4096, 0, 3]]
    >>> limits_of("tcp-64k", 3), limits_of("tcp-4k", 3), limits_of("shm-4k-2", 3)
    ([['tcp', 268435456, 1048576, 2, 3]], [], [])
    """
    (wire, block, threads), size = CASES[case], SIZE_MIB * MIB
    if block is None:
        return [["pingpong", 4096, 0, 1, 500]] if wire == "tcp" else []
    if wire == "tcp":
        # It knows streams of one piece only: an upper bound for large pages, none that says much for small ones.
        return [["tcp", size, MIB, 2, reps]] if block != 4096 else []
    if threads > 1:
        # It copies pages, and out of a memfd, by one thread only.
        return [] if block else [["memcpy", size, threads, 0, reps]]
    alike = ["paged", size, block, 0, reps] if block else ["memcpy", size, 1, 0, reps]
    return [["memfd", size, block, 0, reps], alike]


def peer_figures(lines):
    """A peer script's lines by block size: 0 for one piece, None for one small block alone.

    >>> peer_figures([{"case": "setup", "agent_ms": 400, "load_md_ms": 2, "connect_ms": 1, "first_4KiB_ms": 3},
    ...     {"case": "contig 256 MiB", "GBps": 2.5, "cpu_s_per_GB": 1.0, "ok": True},
    ...     {"case": "paged 4 KiB", "GBps": 0.7, "cpu_s_per_GB": 3.0, "ok": False},
    ...     {"case": "single 4 KiB", "p50_us": 20.0}, {"case": "single 64 KiB", "p50_us": 50.0}])
    {0: {'gb_per_s': 2.5, 'cpu_s_per_gb': 1.0}, 4096: {'error': 'wrong bytes'}, None: {'p50_us': 20.0, 'start_ms': 406}}
    >>> peer_figures([{"case": "setup", "error": "NIXL_ERR_BACKEND"}])
    {'all': {'error': 'NIXL_ERR_BACKEND'}}
    """
    found, start = {}, {}
    for line in lines:
        word, *rest = line["case"].split()
        steps = [line.get(step, 0) for step in ["agent_ms", "load_md_ms", "connect_ms", "first_4KiB_ms"]]
        if word == "setup" and "error" in line:
            return {"all": {"error": line["error"]}}
        if word == "setup":
            start = {"start_ms": sum(steps)}
        elif word == "single" and rest[0] == "4":
            found[None] = {"error": line["error"]} if "error" in line else {"p50_us": line["p50_us"]}
        elif word in ["contig", "paged"]:
            block = int(rest[0]) * 1024 if word == "paged" else 0
            figures = {"gb_per_s": line.get("GBps"), "cpu_s_per_gb": line.get("cpu_s_per_GB")}
            wrong = {"error": "wrong bytes"} if not line.get("ok", True) else None
            found[block] = {"error": line["error"]} if "error" in line else wrong or figures
    if None in found:
        found[None] |= start
    return found


def judge(rows):
    """Each bar with what the pairs say about it."""
    found = []
    for name, case, against, sense, bar in BARS:
        values, strict = [], []
        for pair in sorted({row["pair"] for row in rows}):
            of_pair = [row for row in rows if row["pair"] == pair]
            values += figure(of_pair, case, against, "limit")
            strict += figure(of_pair, case, against, "limit_best") if against.startswith("limit ") else []
        if values:
            low, high = interval(values)
            found.append(
                {
                    "kind": "bar",
                    "bar": name,
                    "at": sense,
                    "value": bar,
                    "pairs": len(values),
                    "median": statistics.median(values),
                    "low": low,
                    "high": high,
                    "of_best": statistics.median(strict) if strict else None,
                    "verdict": verdict((low, high), sense, bar),
                }
            )
    return found


def figure(rows, case, against, statistic):
    """What one pair says: Towline's own figure, or its rate divided by another's; nothing where one is missing.

    >>> rows = [{"who": "towline", "case": "tcp", "gb_per_s": 3.0, "limit": 2.0}, {"who": "limits", "case": "tcp",
    ...     "limit": 4.0}, {"who": "nixl", "case": "tcp", "gb_per_s": 1.0}, {"who": "nixl, x", "case": "tcp",
    ...     "gb_per_s": 1.5}]
    >>> [figure(rows, "tcp", against, "limit") for against in ["limit tcp", "nixl", "mooncake", "p50_us"]]
    [[0.75], [2.0], [], []]
    """
    ours = next((row for row in rows if row["who"] == "towline" and row["case"] == case), {})
    if against.startswith("limit "):
        of_case = [row for row in rows if row["case"] == against.removeprefix("limit ")]
        others = [row.get(statistic) for row in of_case if row["who"] in ["towline", "limits"]]
    elif against in ["nixl", "mooncake", "huge pages"]:
        of_case = [row for row in rows if row["case"] == case and row["who"].startswith(against)]
        others = [row.get("gb_per_s") for row in of_case]
    else:
        return [ours[against]] if ours.get(against) else []
    best = max((other for other in others if other), default=None)
    return [ours["gb_per_s"] / best] if best and ours.get("gb_per_s") else []


def interval(values, coverage=0.95):
    """The narrowest pair of equally deep order statistics that holds the median with at least `coverage`: (low, high);
    None for both when there are too few values for any.

    The number of values below the true median is binomial with p = 1/2.

    >>> interval(list(range(1, 16)))
    (4, 12)
    >>> interval([3, 1, 2, 6, 5, 4])
    (1, 6)
    >>> interval([1, 2, 3, 4, 5])
    (None, None)
    """
    count, ordered = len(values), sorted(values)
    outside, depth = 0.0, 0
    while depth < count / 2:
        outside += 2 * math.comb(count, depth) / 2**count
        if outside > 1 - coverage:
            break
        depth += 1
    return (ordered[depth - 1], ordered[count - depth]) if depth else (None, None)


def verdict(ends, sense, bar):
    """As the project defines it; an interval that holds the bar misses it, and says that more pairs may tell.

    >>> [verdict((0.96, 1.1), ">=", 0.95), verdict((0.9, 0.94), ">=", 0.95), verdict((0.9, 1.0), ">=", 0.95)]
    ['met', 'missed', 'missed (within the noise)']
    >>> [verdict((1.0, 1.9), "<=", 2.0), verdict((None, None), "<=", 2.0), verdict((1, 2), ">=", None)]
    ['met', 'too few pairs', 'reported']
    """
    low, high = ends
    if bar is None:
        return "reported"
    if low is None:
        return "too few pairs"
    near, far = (low, high) if sense == ">=" else (-high, -low)
    bar = bar if sense == ">=" else -bar
    if near >= bar:
        return "met"
    return "missed (within the noise)" if far >= bar else "missed"


def table(rows, found):
    """For people: everybody's medians, then the bars."""
    heads = f"{'GB/s':>7} {'limit':>7} {'best':>7} {'CPU s/GB':>9} {'p50 us':>8} {'start ms':>9}"
    lines = [f"{'case':<12} {'who':<38} {heads}"]
    for case in CASES:
        whos = dict.fromkeys(row["who"] for row in rows if row["case"] == case)
        for who in whos:
            mine = [row for row in rows if row["case"] == case and row["who"] == who]
            columns = ["gb_per_s", "limit", "limit_best", "cpu_s_per_gb", "p50_us", "start_ms"]
            cells = [median_of(mine, column) for column in columns]
            errors = {row["error"] for row in mine if "error" in row}
            text = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, [7, 7, 7, 9, 8, 9]))
            lines.append(f"{case:<12} {who:<38} {text} {'; '.join(sorted(errors))}".rstrip())
    lines += ["", f"{'bar':<50} {'median':>8} {'95 %':>17} {'of best':>8} {'bar':>9} {'pairs':>5}  verdict"]
    for line in found:
        ends = f"{number(line['low'])} .. {number(line['high'])}"
        bar = "" if line["value"] is None else f"{line['at']} {line['value']:g}"
        lines.append(
            f"{line['bar']:<50} {number(line['median']):>8} {ends:>17} {number(line['of_best']):>8} {bar:>9} "
            f"{line['pairs']:>5}  {line['verdict']}"
        )
    return "\n".join(lines)


def number(value):
    """Three digits, a dash for none."""
    return "-" if value is None else f"{value:.3g}"


def median_of(rows, column):
    """The median of a column with three digits, a dash for none.

    >>> median_of([{"a": 1.0}, {"a": 2.0}, {"b": 3.0}], "a"), median_of([], "a")
    ('1.5', '-')
    """
    values = [row[column] for row in rows if row.get(column) is not None]
    return number(statistics.median(values) if values else None)


if __name__ == "__main__":
    sys.exit(main())
