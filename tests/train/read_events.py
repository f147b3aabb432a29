"""Prints what TensorBoard's own reader finds in a folder or a file of events.

    read_events.py PATH

One JSON object: "curves" by tag, each a list of [step, value], as TensorBoard
shows them, "versions", the version event of each file, and "times", when
each event was written.
"""

import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing import event_accumulator, event_file_loader
from tensorboard.util import tensor_util


def known(value):
    """JSON has no numbers that are not finite: they become text."""
    return value if math.isfinite(value) else str(value)


def main():
    path = pathlib.Path(sys.argv[1])
    keep_all = {event_accumulator.TENSORS: 0, event_accumulator.SCALARS: 0}
    accumulator = event_accumulator.EventAccumulator(str(path), size_guidance=keep_all)
    accumulator.Reload()
    tags = accumulator.Tags()
    curves = {tag: [[e.step, known(e.value)] for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:  # how newer readers keep scalars
        curves[tag] = [
            [e.step, known(float(tensor_util.make_ndarray(e.tensor_proto)))] for e in accumulator.Tensors(tag)
        ]
    files = sorted(path.glob("*tfevents*")) if path.is_dir() else [path]
    versions, times = [], []
    for file in files:
        events = list(event_file_loader.LegacyEventFileLoader(str(file)).Load())
        versions.append(events[0].file_version)
        times += [event.wall_time for event in events]
    print("\n" + json.dumps({"curves": curves, "versions": versions, "times": times}))


if __name__ == "__main__":
    main()
