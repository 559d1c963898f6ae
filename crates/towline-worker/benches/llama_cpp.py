"""llama.cpp on the same file, machine and threads: what `engine.rs` is compared with.

    pip install xllamacpp==2026.10.11549
    TOWLINE_MODEL=model.gguf python llama_cpp.py [--threads N]

Prints JSON lines of the same form: the median and the best of several runs. llama.cpp measures itself (`timings`),
so HTTP and JSON are not counted. Its threads spin: on a busy machine it suffers more than the engine, so run both on
an idle one.
"""

import json
import os
import statistics
import sys

import xllamacpp


def main():
    threads = int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 2
    parameters = xllamacpp.CommonParams()
    parameters.model.path = os.environ["TOWLINE_MODEL"]
    parameters.n_ctx = 4096
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def run(context, decode):
        prompt = [1000 + i * 7919 % 40000 for i in range(context)]
        request = {
            "prompt": prompt,
            "max_tokens": decode,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        return server.handle_completions(request)["timings"]

    def report(what, context, rates):
        print(
            json.dumps(
                {
                    "bench": what,
                    "machine": f"{threads} threads, llama.cpp",
                    "context_tokens": context,
                    "tokens_per_s": round(statistics.median(rates), 1),
                    "tokens_per_s_best": round(max(rates), 1),
                }
            ),
            flush=True,
        )

    for context in (128, 512):
        report("prefill", context, [run(context, 1)["prompt_per_second"] for _ in range(5)])
    for context in (128, 512, 2048):
        report("decode", context, [run(context, 17)["predicted_per_second"] for _ in range(3)])


main()
