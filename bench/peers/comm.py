#!/usr/bin/env python3
"""OpenMPI's collectives, for the rows of comm_bench: compiles and runs mpi_collectives.cpp.

    bench/peers/comm.py --ranks 2

Where there is no OpenMPI with its headers (Debian: libopenmpi-dev) it says so, and its
rows are left out.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parent / "mpi_collectives.cpp"


def openmpi_compiler():
    """OpenMPI's own, or nothing: other MPIs do not know --showme."""
    for name in ("mpicxx.openmpi", "mpicxx"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--showme:version"], capture_output=True, check=False).returncode == 0:
            return found
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    compiler = openmpi_compiler()
    if not compiler or not shutil.which("mpirun"):
        print("comm: no OpenMPI here (Debian: libopenmpi-dev), so its rows are left out")
        return 0
    with tempfile.TemporaryDirectory(prefix="tessera_bench") as folder:
        program = f"{folder}/mpi_collectives"
        compiled = subprocess.run([compiler, "-std=c++20", "-O3", "-o", program, str(SOURCE)], capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            if "mpi.h" in compiled.stderr:
                print("comm: OpenMPI has no headers here (Debian: libopenmpi-dev), so its rows are left out")
                return 0
            sys.stderr.write(compiled.stderr)
            return 1
        # OpenMPI looks for ssh even where no other host is asked for.
        launcher = ["mpirun", "--mca", "plm", "isolated", "--oversubscribe", "-np", str(args.ranks)]
        if os.getuid() == 0:
            launcher.insert(1, "--allow-run-as-root")
        return subprocess.run(launcher + [program] + ["--quick"] * args.quick, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
