"""One Prefect server for all tests of a session; each test has a project folder, and an MLflow database, of
its own."""

from __future__ import annotations

import os
import shutil

import pytest

from flows import prefect_home
from tests.flows.harness import Project
from tests.s3.conftest import object_server, proxied_env, proxy, s3_root  # noqa: F401


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory):
    """The address of a real Prefect API server."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect"))
    server = prefect_home.OwnServer()
    server.start()
    try:
        server.wait()
        yield server.url
    finally:
        server.kill()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory):
    """A file with MLflow's empty tables, to be copied: making them takes seconds."""
    from flows import tracking

    folder = tmp_path_factory.mktemp("mlflow")
    tracking.client(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def empty_project(prefect_api, tmp_path):
    """A project in which nothing has ever been done."""
    return Project(tmp_path, prefect_api)


@pytest.fixture
def project(empty_project, mlflow_database):
    """A project whose flows talk to the session's Prefect server, and whose MLflow database is there
    already."""
    (empty_project.home / "runs").mkdir()
    shutil.copy(mlflow_database, empty_project.home / "runs" / "mlflow.db")
    return empty_project


@pytest.fixture
def started(project):
    """Start a command in the project; whatever still runs at the end of the test is ended."""
    running = []

    def start(flow, *args):
        running.append(project.start(flow, *args))
        return running[-1]

    yield start
    for each in running:
        each.end()
