"""Kill trainings, conversions, pushes and pulls at random moments, do each again, and compare with what nobody killed.

PYTHONPATH=.:tests python -m faults --kills 1000 --seed 7

Trainings save after every step and go on from their last complete checkpoint: all losses and the last weights must be
the same. A conversion replaces a checkpoint in a folder with files of its user's: these stay, the old checkpoint or the
new one is whole, and the next conversion makes the same files. A push replaces a model on a Hub on the loopback, which
shows all of the old one or all of the new one. A pull gets the same weights in spite of what an earlier one has left.

Prints, as JSON, the seed, the machine with its versions and the date, and how often each was killed before it had
ended; ends with an error at the first that lost something.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def hub_process(folder: Path) -> Iterator[Any]:
    """Run a Hub in a process of its own, which has threads that must not be forked, and take its environment over."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        from hub_server import running_hub

        with running_hub(folder) as hub:
            os.write(writer, json.dumps([hub.url, hub.environment()]).encode())
            os.close(writer)
            signal.pause()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        url, environment = json.load(pipe)
    # read when huggingface_hub is imported, which the next import does; HF_HUB_OFFLINE is in there no longer
    os.environ.clear()
    os.environ.update(environment, HF_HUB_DISABLE_PROGRESS_BARS="1")
    from hub_server import Hub

    try:
        yield Hub(url, folder, {})
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in all; the kinds take turns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hub_process(Path(name) / "hub") as hub:
        from faults.kills import kill, record

        print(json.dumps(record(options.seed) | kill(Path(name), hub, options.kills, random.Random(options.seed))))


if __name__ == "__main__":
    main()
