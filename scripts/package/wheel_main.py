"""Starts the program `tessera` with the LibTorch of the torch beside it."""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys

WANTED = "@TORCH_VERSION@"


def torch_folder():
    spec = importlib.util.find_spec("torch")
    if spec is None:
        sys.exit(f"tessera: there is no torch in {sys.prefix}. Install it: pip install torch=={WANTED}")
    found = importlib.metadata.version("torch").split("+")[0]
    if found != WANTED:
        sys.exit(
            f"tessera: this Tessera was built with torch {WANTED}, and {sys.prefix} has torch {found}."
            f" Install the former (pip install torch=={WANTED}), or a Tessera for torch {found}."
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def main():
    program = pathlib.Path(__file__).parent / "libexec" / "tessera" / "tessera"
    libraries = [str(torch_folder() / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
