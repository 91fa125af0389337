"""The field ``steering`` of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from localllm import Steering, UsageError
from localllm.inspection.steering import read_folder
from tests.helpers.http_server import Serving, demo, serving
from tests.localllm.inspection.test_steering import vector, write_control_vector


def post(server: Serving, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=120)


def text(server: Serving, **fields: Any) -> str:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_requests_choose_vectors_of_the_folder(tmp_path: Path) -> None:
    write_control_vector(tmp_path / "happy.gguf", {2: vector(1, 256)})
    write_control_vector(tmp_path / "sad.gguf", {3: vector(2, 256)})
    steering = read_folder(tmp_path)
    assert [*steering] == ["happy", "sad"]
    options = {"max_tokens": 6, "temperature": 0}
    with serving(demo(), steering=steering) as server:
        plain = text(server)
        for factors in ({"happy": 1.0}, {"happy": -4, "sad": 8}, {}):
            steer = [steering[name].scaled(factor) for name, factor in factors.items()]
            assert (
                text(server, steering=factors) == server.llm.generate("Once upon a time", steer=steer, **options).text
            )
        assert text(server, steering={"happy": 8}) != plain == text(server)
        unknown = post(server, steering={"angry": 1})
        assert unknown.status_code == 400
        assert "steering: there is no vector 'angry', the vectors are happy, sad" in unknown.text
        error = post(server, steering={"happy": 1e39}).json()["error"]
        assert error["param"] == "steering"
        assert error["message"].startswith("steering has a vector of 'layers.2.output' that is infinite times the")


def test_without_a_folder_requests_cannot_steer() -> None:
    with serving(demo()) as server:
        refused = post(server, steering={"happy": 1})
        assert refused.status_code == 400
        assert "steering: this server has no vectors: start it with --steering DIR" in refused.text


def test_a_folder_without_vectors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"contains no control vectors, which are .gguf files: name another folder$"):
        read_folder(tmp_path)


def test_a_scaled_steering() -> None:
    steering = Steering({"logits": [1.0, 2.0]}, scale=2, positions=[0]).scaled(0.25)
    assert (steering.scale, steering.positions) == (0.5, [0])
    np.testing.assert_array_equal(steering.vectors["logits"], [1, 2])
