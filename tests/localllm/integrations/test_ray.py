"""A cluster of three machines simulated by Ray; some are killed while they work."""

from __future__ import annotations

import gc
import inspect
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import localllm

# Ray's proxy may need more than Ray's five seconds to start on a busy machine.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")

ray = pytest.importorskip("ray", reason="ray is not installed")

#: Warnings of Ray's modules.
pytestmark = pytest.mark.filterwarnings("default")

#: Slow enough to kill a machine during a reply.
SLOW = {"device": "reference"}
N_TOKENS = 30


def chat(url: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": N_TOKENS, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


#: Options of each machine.  Ray's object store is memory, by default a third of the machine's.
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}

#: Ray runs workers at low priority; on two busy processors they would take minutes to start.
SYSTEM = {"worker_niceness": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three machines.  A machine that a test removes is replaced, see `losing_a_machine`."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": SYSTEM}
    )
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_the_command_serve_run_makes_a_config_of_its_words() -> None:
    """Ray converts ``model=demo max_replicas=2`` to the type of the parameter, which must not be str."""
    from ray.serve import Application

    from localllm.integrations.ray_serve import RayConfig, app

    (parameter,) = inspect.signature(app).parameters.values()
    assert parameter.annotation is RayConfig
    assert isinstance(app(parameter.annotation.model_validate({"model": "demo", "max_replicas": "2"})), Application)


@contextmanager
def losing_a_machine(cluster: Any) -> Iterator[None]:
    """Kill a machine, and add another one at the end."""
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    yield
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()


@pytest.fixture
def url(cluster: Any) -> Iterator[str]:
    from ray import serve

    from localllm.integrations.ray_serve import RayConfig, app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # All machines of this cluster share an address, so connections would go to any machine and break with it.
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    try:
        serve.run(app(RayConfig(min_replicas=3, max_replicas=3, threads=1, load=SLOW)))
        yield f"http://127.0.0.1:{port}"
    finally:  # also if it did not start in time: the next test uses another port
        serve.shutdown()


def test_a_machine_is_killed_in_the_middle_of_requests(cluster: Any, url: str) -> None:
    texts = [f"{word} is it?" for word in ("What", "Who", "Where", "When", "Why", "How")]
    with localllm.load(**SLOW) as llm:
        expected = [
            llm.chat([{"role": "user", "content": text}], temperature=0, max_tokens=N_TOKENS).text for text in texts
        ]
    with ThreadPoolExecutor(2 * len(texts)) as threads:
        answers = [threads.submit(chat, url, text) for text in texts]
        streams = [threads.submit(streamed, url, text) for text in texts]
        time.sleep(0.5)
        assert not all(answer.done() for answer in answers)
        with losing_a_machine(cluster):
            found = [answer.result()["choices"][0]["message"]["content"] for answer in answers]
    assert found == expected
    for (text, is_whole), all_of_it in zip([stream.result() for stream in streams], expected, strict=True):
        assert text == all_of_it if is_whole else all_of_it.startswith(text)


def streamed(url: str, text: str) -> tuple[str, bool]:
    """Return the received part of a reply, and whether it is complete."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": N_TOKENS, "stream": True}
    said = ""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return said, True
                if line:
                    said += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    except httpx.RemoteProtocolError:
        pass
    return said, False


def test_conversations_stay_where_their_cache_is(url: str) -> None:
    for text in ("What is it?", "Who is it?", "Where is it?", "When is it?"):
        first = chat(url, text, max_tokens=8)
        messages = [
            {"role": "user", "content": text},
            first["choices"][0]["message"],
            {"role": "user", "content": "So?"},
        ]
        n_cached = chat(url, text, messages=messages)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert n_cached >= first["usage"]["prompt_tokens"] - 1


def test_streams_come_piece_by_piece_and_errors_are_the_servers(url: str) -> None:
    said, is_whole = streamed(url, "What is it?")
    assert is_whole
    assert said == chat(url, "What is it?")["choices"][0]["message"]["content"]
    refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": 7}, timeout=120)
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/nothing", timeout=120).status_code == 404


def test_keys_of_conversations() -> None:
    from localllm.integrations.ray_serve import conversation_key

    def key(**body: Any) -> str:
        return conversation_key(json.dumps(body).encode())

    first, other = {"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}
    assert (
        key(messages=[first])
        == key(messages=[first, {"role": "assistant", "content": "?"}, other])
        != key(messages=[other])
    )
    assert key(messages=[first], system="x") != key(messages=[first])
    assert key(prompt="a" * 600) == key(prompt="a" * 700) != key(prompt="b" * 700)
    assert key(input=["a", "b"]) == conversation_key(b"") == conversation_key(b"[]") == ""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "prompts").mkdir()
    for number in range(6):
        ids = list(range(4 * number, 4 * number + 4))
        table = pa.table({"id": ids, "prompt": [f"Once upon a time there were {id_} dogs" for id_ in ids]})
        pq.write_table(table, tmp_path / "prompts" / f"{number}.parquet")
    return tmp_path


def alone(rows: Path) -> dict[int, str]:
    with localllm.load(**SLOW) as llm:
        prompts = [f"Once upon a time there were {id_} dogs" for id_ in range(24)]
        return dict(enumerate(each.text for each in llm.generate_many(prompts, max_tokens=12, temperature=0)))


def written(rows: Path) -> dict[int, str]:
    import pyarrow.parquet as pq

    found = [row for file in (rows / "answers").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(found) == len({row["id"] for row in found})
    return {row["id"]: row["text"] for row in found}


def test_a_machine_is_killed_while_a_dataset_is_answered(cluster: Any, rows: Path) -> None:
    import ray.data

    from localllm.integrations.ray_data import generate

    dataset = ray.data.read_parquet(str(rows / "prompts"), override_num_blocks=6)
    answers = generate(
        dataset, actors=(1, 2), threads=1, batch_size=4, load_options=SLOW, max_tokens=12, temperature=0
    )
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(answers.write_parquet, str(rows / "answers"))
        end = time.monotonic() + 120
        while not list(rows.glob("answers/*")) and time.monotonic() < end and not done.done():
            time.sleep(0.05)
        assert not done.done()
        with losing_a_machine(cluster):
            done.result(timeout=300)
    assert written(rows) == alone(rows)


def test_a_later_run_goes_on_where_an_earlier_one_ended(cluster: Any, rows: Path) -> None:
    import ray.data

    from localllm.integrations.ray_data import generate, resume

    resume(str(rows / "done"))

    def run() -> None:
        dataset = ray.data.read_parquet(str(rows / "prompts"), override_num_blocks=6)
        answers = generate(
            dataset, actors=1, threads=1, batch_size=4, load_options=SLOW, max_tokens=12, temperature=0
        )
        answers.map_batches(fails_once, fn_args=(str(rows),), num_cpus=0.1).write_parquet(str(rows / "answers"))

    with pytest.raises(Exception, match="the power fails"):
        run()
    # The error's traceback refers to the first run's actors, whose processors the second run needs.
    end = time.monotonic() + 120
    while ray.available_resources().get("CPU", 0) < 3:
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.5)
    before = written(rows)
    assert 0 < len(before) < 24
    times = {file: os.stat(file).st_mtime_ns for file in (rows / "answers").rglob("*.parquet")}
    run()
    assert written(rows) == alone(rows)
    assert all(os.stat(file).st_mtime_ns == time for file, time in times.items())


def fails_once(batch: dict[str, Any], folder: str) -> dict[str, Any]:
    marker = Path(folder, "failed")
    if 20 in batch["id"] and not marker.exists():
        end = time.monotonic() + 300
        while not list(Path(folder).glob("answers/*.parquet")) and time.monotonic() < end:
            time.sleep(0.05)
        marker.touch()
        raise RuntimeError("the power fails")
    return batch
