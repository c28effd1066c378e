"""`make run-s3`: the story of `make run` on a real object store, which is started for it on this machine's
loopback and ended with it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ckpt.errors import CheckpointError
from ckpt.store import Store, open_store
from flows.demo import Demo
from flows.object_server import ObjectServer, ObjectServerError
from flows.overrides import ConfigError
from flows.project import project_dir, shown

# What stays on this machine whatever the storage is: logs of ranks, metrics on their way, the databases.
LOCAL = (".logs", ".spool", ".prefect", "mlartifacts", "mlflow.db")


def main() -> int:
    """Tell the story; arguments are overrides for its runs."""
    folder = Path(tempfile.mkdtemp(prefix="object-store-"))
    server = ObjectServer(folder)

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        server.start()
        return _tell(server, sys.argv[1:], end)
    except (ConfigError, CheckpointError, ObjectServerError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        end()


def _tell(server: ObjectServer, extra: list[str], leave: Callable[[], None]) -> int:
    for name in [n for n in os.environ if n.startswith(("AWS_", "CKPT_S3_"))]:
        del os.environ[name]
    os.environ.update(server.environment())
    print(f"object store: SeaweedFS at {server.endpoint}, bucket {server.bucket}", flush=True)
    runs = project_dir() / "runs"
    before = set(_files(runs))
    root = f"s3://{server.bucket}/demo"
    where = ["storage=s3", f"storage.root={root}", f"storage.s3.endpoint={server.endpoint}"]
    demo = Demo([*where, *extra], lasting=False, leave=leave)
    code = demo.tell()
    if code != 0:
        return code
    count, size = _held(open_store(demo.run_uri))
    print(f"in the bucket: {demo.run_uri}, {count} objects, {size / 1e6:.0f} MB")
    made = [path.relative_to(runs) for path in _files(runs) if path not in before]
    of_run = [path for path in made if not path.parts[0].startswith(LOCAL)]
    if of_run:
        print(f"on this disk:  {len(of_run)} files of the run, such as {shown(runs / of_run[0])}")
        return 1
    print(
        f"on this disk:  nothing of the run; {shown(runs)} holds logs and the databases of Prefect and MLflow"
    )
    print("next:  the object store ends here; for one of your own, see docs/storage.md")
    return 0


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def _held(store: Store, prefix: str = "") -> tuple[int, int]:
    """Objects below a prefix, and their bytes."""
    count = size = 0
    for entry in store.list(prefix):
        if entry.is_dir:
            more, bytes_more = _held(store, f"{prefix}/{entry.name}" if prefix else entry.name)
        else:
            more, bytes_more = 1, entry.size
        count, size = count + more, size + bytes_more
    return count, size


if __name__ == "__main__":
    sys.exit(main())
