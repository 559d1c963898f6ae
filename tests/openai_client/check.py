"""The official OpenAI Python client against a deployment of separate processes, with the real model.

It is what most users come with, and it is stricter than curl: it validates chunks, usage and errors.

Usage: check.py TOWLINE MODEL
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading

import openai

QUESTION = [{"role": "user", "content": "Name the capital city of France."}]
RECEIPT = {"X-Towline-Receipt": "1"}
START_SECONDS = 180
REQUEST_SECONDS = 120


@contextlib.contextmanager
def deployment(towline: str, model: str):
    """Starts `towline up`; yields its address, then stops it with Ctrl-C and checks that it ended well."""
    command = [
        towline,
        "--format",
        "json",
        "up",
        "--model",
        model,
        "--listen",
        "127.0.0.1:0",
        "--transport",
        "auto",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        ready = json.loads(process.stdout.readline() or "{}")
        timer.cancel()
        assert ready.get("event") == "listening", f"towline up did not start: {ready}"
        yield ready["http"], ready["model"], process.stdout
    finally:
        timer.cancel()
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert status == 0, f"Ctrl-C ended towline up with {status}"


def whole(client: openai.OpenAI, model: str) -> str:
    """An answer in one piece, with its usage and the receipt of the KV that travelled for it."""
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0, extra_headers=RECEIPT
    )
    receipt = answer.usage.model_dump()["towline_receipt"]
    assert receipt["bytes"] > 0 and receipt["transport"] in ("shm", "tcp"), receipt
    text = answer.choices[0].message.content
    assert "Paris" in text, text
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return text


def streamed(client: openai.OpenAI, model: str) -> str:
    """The same answer in chunks; the last one carries usage and the receipt."""
    chunks = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=RECEIPT,
    )
    text, usage, count = "", None, 0
    for chunk in chunks:
        count += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert count > 3, f"{count} chunks: the answer was held back"
    # No bytes this time: the decode worker still has the blocks of the same prompt.
    assert usage.model_dump()["towline_receipt"]["transport"] in ("shm", "tcp"), usage
    return text


def completion(client: openai.OpenAI, model: str) -> None:
    """The endpoint without a chat template."""
    prompt = "The capital of France is"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text, answer.choices[0].text


def errors(client: openai.OpenAI, model: str) -> None:
    """Errors arrive as the client's own exceptions, with their cause."""
    try:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
        raise AssertionError("an unknown model was accepted")
    except openai.NotFoundError as error:
        assert "no-such-model" in str(error), error
    try:
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=-1)
        raise AssertionError("a negative limit was accepted")
    except openai.BadRequestError as error:
        assert "max_tokens" in str(error), error


def receipts(lines) -> int:
    """Counts the receipts that `up` printed, one for each request."""
    return sum(1 for line in lines if json.loads(line)["event"] == "kv_transfer")


def main() -> int:
    """Runs every check against one deployment."""
    towline, model = sys.argv[1:]
    with deployment(towline, model) as (address, name, lines):
        client = openai.OpenAI(
            base_url=f"{address}/v1", api_key="unused", timeout=REQUEST_SECONDS, max_retries=0
        )
        assert name in [entry.id for entry in client.models.list()], "the model is not listed"
        one = whole(client, name)
        two = streamed(client, name)
        assert one == two, f"streamed and whole differ:\n{one}\n{two}"
        completion(client, name)
        errors(client, name)
    assert receipts(lines) >= 2, "no receipts of the requests on standard output"
    print(f"the official OpenAI client {openai.__version__} gets sensible answers: {one!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
