#!/usr/bin/env python3
"""Makes packages of a build: a .deb, a relocatable .tar.gz and a Python wheel.

    scripts/make_packages.py --build build/release --out build/packages

Each has the program, the library, headers, CMake files, manual pages and
completions, and none has LibTorch: bin/tessera looks for the LibTorch of the
host and refuses another version by name; find_package(Tessera) does the same.
The wheel finds the torch that is installed beside it.
"""

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
SUMMARY = "Sharded data-parallel training for C++ on LibTorch"
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# The same sources give the same bytes.
DATE = (1980, 1, 1, 0, 0, 0)


def cached(build, name):
    """A value of the build's CMakeCache.txt."""
    text = (build / "CMakeCache.txt").read_text()
    found = re.search(rf"^{name}:\w+=(.*)$", text, re.M)
    if not found:
        sys.exit(f"make_packages: {build} has no {name}. Run `make build` first.")
    return found[1]


def template(name, torch_version):
    return (HERE / "package" / name).read_text().replace("@TORCH_VERSION@", torch_version)


def make_executable(path):
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def stage(build, root, torch_version):
    """Installs into root, and removes what is true on this host only."""
    subprocess.run(["cmake", "--install", build, "--prefix", root], check=True, stdout=subprocess.DEVNULL)
    program = root / "libexec" / "tessera" / "tessera"
    program.parent.mkdir(parents=True)
    (root / "bin" / "tessera").rename(program)
    library = next((root / "lib").glob("libtessera.so.*.*.*"))
    # From site-packages/tessera/ to site-packages/torch/lib; elsewhere the
    # launcher, or the program that was linked, says where LibTorch is.
    subprocess.run(["patchelf", "--set-rpath", "$ORIGIN/../../torch/lib", library], check=True)
    subprocess.run(["patchelf", "--set-rpath", "$ORIGIN/../../../torch/lib", program], check=True)
    subprocess.run(["strip", "--strip-unneeded", library, program], check=True)
    config = root / "lib" / "cmake" / "Tessera" / "TesseraConfig.cmake"
    torch_root = (build.parent / "torch-root").read_text().strip()
    config.write_text(config.read_text().replace(torch_root, "${PACKAGE_PREFIX_DIR}/../torch"))
    # Programs may name headers of this host in the places of their errors, but load nothing from it.
    for path in root.rglob("*.cmake"):
        if torch_root in path.read_text():
            sys.exit(f"make_packages: {path.relative_to(root)} names {torch_root}, a folder of this host")
    for path in (library, program):
        places = subprocess.run(["patchelf", "--print-rpath", path], check=True, capture_output=True, text=True)
        if not places.stdout.startswith("$ORIGIN"):
            sys.exit(f"make_packages: {path.relative_to(root)} looks for libraries in {places.stdout.strip()}")
    launcher = root / "bin" / "tessera"
    launcher.write_text(template("tessera.sh", torch_version))
    make_executable(launcher)


def make_tar(root, out, name):
    path = out / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, arcname=name)
    return path


def make_deb(root, out, version, torch_version):
    architecture = DEBIAN_ARCHITECTURES[platform.machine()]
    path = out / f"tessera_{version}_{architecture}.deb"
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        shutil.copytree(root, tree / "usr", symlinks=True)
        (tree / "DEBIAN").mkdir()
        (tree / "DEBIAN" / "control").write_text(
            f"Package: tessera\nVersion: {version}\nArchitecture: {architecture}\n"
            "Section: science\nPriority: optional\n"
            "Maintainer: The Tessera authors <tessera@localhost>\n"
            "Depends: libc6 (>= 2.36), libstdc++6 (>= 12)\nSuggests: python3\n"
            f"Description: {SUMMARY}\n"
            f" Needs LibTorch {torch_version}, which is not part of this package: the torch of\n"
            " python3 (pip install torch), or a folder named by TESSERA_TORCH_ROOT.\n"
        )
        tree.chmod(0o755)
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, path], check=True, stdout=subprocess.DEVNULL)
    return path


def wheel_files(root, version, torch_version):
    """(name in the wheel, bytes, is a program) of every file but RECORD."""
    info = f"tessera-{version}.dist-info"
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        # A wheel has no links: the library goes in under the name that programs
        # load, and CMake's files name that one.
        if path.is_dir() or path.is_symlink() or relative.parts[0] == "bin":
            continue
        yield f"tessera/{relative}", path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR)
    yield "tessera/__init__.py", b'"""The program `tessera`, its library, headers and CMake files."""\n', False
    yield "tessera/__main__.py", template("wheel_main.py", torch_version).encode(), False
    yield f"{info}/entry_points.txt", b"[console_scripts]\ntessera = tessera.__main__:main\n", False
    yield f"{info}/METADATA", (
        f"Metadata-Version: 2.1\nName: tessera\nVersion: {version}\nSummary: {SUMMARY}\n"
        f"License: Apache-2.0\nRequires-Python: >=3.9\nRequires-Dist: torch=={torch_version}\n"
    ).encode(), False
    yield f"{info}/WHEEL", (
        f"Wheel-Version: 1.0\nGenerator: tessera\nRoot-Is-Purelib: false\nTag: {wheel_tag()}\n"
    ).encode(), False


def wheel_tag():
    return f"py3-none-linux_{platform.machine()}"


def flatten_links(root):
    """The library under its SONAME alone, as wheels have no links."""
    library = next((root / "lib").glob("libtessera.so.*.*.*"))
    soname = library.name.rsplit(".", 1)[0]
    for link in (root / "lib").glob("libtessera.so*"):
        if link.is_symlink():
            link.unlink()
    library.rename(root / "lib" / soname)
    targets = next((root / "lib" / "cmake" / "Tessera").glob("TesseraTargets-*.cmake"))
    targets.write_text(targets.read_text().replace(library.name, soname))


def make_wheel(root, out, version, torch_version):
    path = out / f"tessera-{version}-{wheel_tag()}.whl"
    record = ""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        flat = pathlib.Path(folder) / "flat"
        shutil.copytree(root, flat, symlinks=True)
        flatten_links(flat)

        def add(name, data, is_program=False):
            entry = zipfile.ZipInfo(name, DATE)
            entry.external_attr = (0o100755 if is_program else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        for name, data, is_program in wheel_files(flat, version, torch_version):
            add(name, data, is_program)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
        name = f"tessera-{version}.dist-info/RECORD"
        add(name, (record + f"{name},,\n").encode())
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/packages"))
    options = parser.parse_args()
    build = options.build.resolve()
    version = cached(build, "CMAKE_PROJECT_VERSION")
    torch_version = (build.parent / "torch-version").read_text().strip().split("+")[0]
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "root"
        stage(build, root, torch_version)
        name = f"tessera-{version}-torch{torch_version}-linux-{platform.machine()}"
        for path in (
            make_tar(root, options.out, name),
            make_deb(root, options.out, version, torch_version),
            make_wheel(root, options.out, version, torch_version),
        ):
            print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    print(f"LibTorch {torch_version} is in none of them: they use the one of the host.")


if __name__ == "__main__":
    main()
