#!/usr/bin/env python3
"""Kills training runs at random moments and compares what is left bit by bit.

Usage: soak.py --build FOLDER [--kills N] [--seed S] [--work FOLDER]

A run of the GPT trainer is started on 1 to 4 ranks under a random strategy. At a
random moment one rank, or the launcher, is killed with SIGKILL; then the run goes
on at another size and strategy, from the newest checkpoint. After each kill:

- everything that belonged to the run has ended, within minutes;
- every checkpoint in the folder is whole (`tessera ckpt verify`);
- an unkilled run of the same size and strategy, from the checkpoint that the
  killed one had begun with, has made the same checkpoint, bit by bit (`tessera
  ckpt diff`), and the same losses, bit by bit;
- where nothing is dropped at random, the first step after the resume has the loss
  that the killed run had found for it at its own size, up to rounding.

The seed decides what is started, what is killed and when, in steps and seconds.
How far processes have come by then is the machine's, so a seed repeats the plan
of a failure, and most often the failure.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

STRATEGIES = ["fsdp", "ddp", "zero"]
SIZES = [1, 2, 3, 4]
STEPS = 60
KILLS_PER_RUN = 8
ROUNDING = 1e-3
PATIENCE = 300  # seconds; whatever takes longer hangs


class Failure(Exception):
    pass


def clean_environment():
    """This process's, without what a launcher may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items()
            if name not in names and not name.startswith(("TESSERA_", "TORCHELASTIC_"))}


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"after {PATIENCE} s still: {what}")
        time.sleep(0.02)


def processes_of(run):
    """Processes with the run's folder in their command line."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            if str(run).encode() in words:
                found.append(int(entry.name))
    return found


class Training:
    """A run of the trainer that was started."""

    def __init__(self, soak, run, size, strategy, dropout):
        self.run = run
        self.log_begin = log_size(run)
        self.output = open(run.parent / f"{run.name}.out", "ab")
        self.process = subprocess.Popen(
            [soak.tessera, "run", "-n", str(size), "--cpu-threads", "1", soak.gpt,
             "--run", run, "--data", soak.work / "data", "--text", soak.work / "text",
             "--layers", "2", "--width", "32", "--length", "16", "--batch", "12",
             "--warmup", "3", "--device", "cpu", "--steps", str(STEPS),
             "--eval-every", "0", "--sample-tokens", "5", "--checkpoint-every", "3",
             "--keep", "0", "--strategy", strategy, "--dropout", dropout],
            stdout=self.output, stderr=subprocess.STDOUT, env=clean_environment())

    def ranks(self):
        return [pid for pid in processes_of(self.run) if pid != self.process.pid]

    def has_ended(self):
        return self.process.poll() is not None

    def wait(self):
        wait_until(self.has_ended, f"the launcher of {self.run} runs")
        wait_until(lambda: not processes_of(self.run),
                   f"processes of {self.run} run: {processes_of(self.run)}")
        self.output.close()

    def losses(self):
        """By step, those of this start alone."""
        return losses_in(self.run, self.log_begin)


def log_size(run):
    file = run / "log.jsonl"
    return file.stat().st_size if file.exists() else 0


def losses_in(run, begin=0):
    losses = {}
    if log_size(run) == 0:
        return losses
    with open(run / "log.jsonl", "rb") as file:
        file.seek(begin)
        for line in file.read().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # what a kill has cut, and the line that it was cut in
            if entry.get("kind") == "step":
                losses[entry["step"]] = entry["loss"]
    return losses


def checkpoints_of(run):
    """Step -> folder."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    return {int(name[5:]): folder / name for name in names
            if name.startswith("step_") and name[5:].isdigit()}


class Chain:
    """One run that is killed again and again."""

    def __init__(self, soak, number):
        self.soak = soak
        self.run = soak.work / f"run_{number}"
        self.dropout = soak.random.choice(["0", "0.1"])
        self.step = 0  # of the newest checkpoint
        self.verified = set()
        self.lost = {}  # losses of steps after it, that the killed run had made
        self.num_references = 0
        self.run.mkdir()

    def is_over(self):
        return self.step >= STEPS

    def kill_once(self):
        soak = self.soak
        size = soak.random.choice(SIZES)
        strategy = soak.random.choice(STRATEGIES)
        training = Training(soak, self.run, size, strategy, self.dropout)
        target = self.kill(training)
        training.wait()
        losses = training.losses()
        self.verify_all()
        begin, self.step = self.step, max(checkpoints_of(self.run), default=0)
        self.compare_first_loss(losses)
        self.lost = {step: loss for step, loss in losses.items() if step > self.step}
        if losses or self.step > begin:
            self.compare_with_unkilled(begin, size, strategy, losses)
        print(f"{self.run.name}: {strategy} on {size}, killed {target}, "
              f"steps {begin + 1} to {max(losses, default=begin)}, "
              f"goes on from {self.step}", flush=True)
        return target.split()[0]

    def kill(self, training):
        """At a random moment of the start, or of the training. Returns what."""
        choose = self.soak.random
        victim = choose.choice(["rank", "launcher"])
        in_start = choose.random() < 0.25
        steps = choose.randint(1, 10)
        delay = choose.uniform(0, 1.5 if in_start else 0.1)
        index = choose.random()
        if not in_start:
            wait_until(lambda: training.has_ended() or len(training.losses()) >= steps,
                       f"{training.run} makes no step")
        time.sleep(delay)
        ranks = training.ranks()
        if victim == "rank" and ranks:
            pid = ranks[int(index * len(ranks))]
        else:
            victim, pid = "launcher", training.process.pid
        if training.has_ended():
            if training.process.returncode != 0:
                raise Failure(f"{training.run} ended by itself with exit code "
                              f"{training.process.returncode}")
            return "nothing (it was through)"
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return "nothing (it was through)"
        return f"{victim} (process {pid})"

    def verify_all(self):
        for step, folder in sorted(checkpoints_of(self.run).items()):
            if step not in self.verified:
                self.soak.must("ckpt", "verify", folder)
                self.verified.add(step)

    def compare_first_loss(self, losses):
        """Sharding another way gives the state that was saved."""
        shared = sorted(set(losses) & set(self.lost))
        if self.dropout != "0" or not shared:
            return
        step = shared[0]
        if abs(losses[step] - self.lost[step]) > ROUNDING * abs(self.lost[step]):
            raise Failure(f"{self.run}: loss of step {step} is {losses[step]} after the "
                          f"resume, {self.lost[step]} before")
        self.soak.num_resumes += 1

    def compare_with_unkilled(self, begin, size, strategy, losses):
        reference = self.soak.work / f"{self.run.name}_reference_{self.num_references}"
        self.num_references += 1
        (reference / "checkpoints").mkdir(parents=True)
        if begin > 0:
            shutil.copytree(checkpoints_of(self.run)[begin],
                            reference / "checkpoints" / checkpoints_of(self.run)[begin].name)
            shutil.copy(self.run / "settings.json", reference)
        training = Training(self.soak, reference, size, strategy, self.dropout)
        wanted = max([self.step, *losses])
        wait_until(lambda: training.has_ended() or
                   (max(training.losses(), default=0) >= wanted and
                    self.step in {*checkpoints_of(reference), begin}),
                   f"{reference} does not come to step {wanted}")
        if not training.has_ended():
            training.process.send_signal(signal.SIGTERM)
        training.wait()
        expected = training.losses()
        for step, loss in losses.items():
            if expected.get(step) != loss:
                raise Failure(f"loss of step {step} is {loss} in {self.run}, "
                              f"{expected.get(step)} in {reference}")
        self.soak.num_losses += len(losses)
        if self.step > begin:
            self.soak.must("ckpt", "diff", checkpoints_of(self.run)[self.step],
                           checkpoints_of(reference)[self.step])
            self.soak.num_checkpoints += 1
        shutil.rmtree(reference)


class Soak:
    def __init__(self, args):
        build = pathlib.Path(args.build).resolve()
        self.tessera = build / "bin" / "tessera"
        self.gpt = build / "bin" / "gpt"
        self.random = random.Random(args.seed)
        self.work = pathlib.Path(args.work or tempfile.mkdtemp(prefix="tessera_soak_"))
        self.num_checkpoints = 0
        self.num_losses = 0
        self.num_resumes = 0
        (self.work / "text").mkdir(parents=True)
        (self.work / "text" / "numbers.txt").write_text(
            "".join(f"{i} plus {i} is {2 * i}\n" for i in range(2000)))

    def must(self, *words):
        """Runs `tessera words`, which must succeed."""
        result = subprocess.run([self.tessera, *words], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=clean_environment())
        if result.returncode != 0:
            raise Failure(f"tessera {' '.join(map(str, words))} says "
                          f"(exit code {result.returncode}):\n{result.stdout}")

    def run(self, num_kills):
        kills = {"rank": 0, "launcher": 0, "nothing": 0}
        number = 0
        while kills["rank"] + kills["launcher"] < num_kills:
            chain = Chain(self, number)
            number += 1
            for _ in range(KILLS_PER_RUN):
                kills[chain.kill_once()] += 1
                if chain.is_over() or kills["rank"] + kills["launcher"] >= num_kills:
                    break
            shutil.rmtree(chain.run)
        return kills


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--work", help="a folder that is not there yet; kept after a failure")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1_000_000)
    print(f"soak: {args.kills} kills, seed {args.seed}", flush=True)
    began = time.monotonic()
    soak = Soak(args)
    try:
        kills = soak.run(args.kills)
    except Failure as failure:
        print(f"soak: FAILED with seed {args.seed}; all of it is in {soak.work}\n{failure}")
        return 1
    shutil.rmtree(soak.work)
    print(f"soak: {kills['rank']} ranks and {kills['launcher']} launchers killed, "
          f"{soak.num_checkpoints} checkpoints and {soak.num_losses} losses equal bit by bit, "
          f"{soak.num_resumes} first losses at another size equal up to rounding, "
          f"{(time.monotonic() - began) / 60:.1f} min, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
