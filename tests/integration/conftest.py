"""A world for each test, with the options that its module or its parameters say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server

from impress_sglang.plugin import routes
from tests.integration.worlds import World, install_hooks


@pytest.fixture
def options() -> dict[str, Any]:
    """Fields of the configuration beside the defaults."""
    return {}


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> Iterator[World]:
    install_hooks(monkeypatch)
    world = World(tmp_path, **options)
    yield world
    world.close()


@pytest.fixture(params=[1, 16], ids=["tokens", "pages"])
def page_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    app = FastAPI()
    monkeypatch.setattr(http_server, "app", app)
    routes.add_routes()
    app.dependency_overrides[routes.refuse_foreign] = lambda: None
    return TestClient(app)
