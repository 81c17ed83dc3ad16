"""Builds the wheel and the sdist, with update kernels for machines that have no compiler.

make wheel   # writes dist/

`zig cc` compiles for both processors on either, against a C library old enough for any Linux of the
last ten years. The sources are compiled as on first use, but for no processor in particular: any
aarch64, and x86-64 of the third level. So one wheel serves all machines.
"""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS, DIST = ROOT / "src/roundpipe/kernels", ROOT / "dist"
PROCESSORS = {"x86_64": ["-mcpu=x86_64_v3"], "aarch64": []}


def flags() -> list[str]:
    """Those that it is compiled with on first use but for the processor, of a module that runs
    without the package, and so without torch."""
    spec = importlib.util.spec_from_file_location("native", KERNELS / "native.py")
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return [flag for flag in native._FLAGS if not flag.startswith("-march")]


def compile_for(machine: str) -> Path:
    target = KERNELS / f"update-{machine}.so"
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17"),
            *(*flags(), *PROCESSORS[machine], "-pthread", "-s"),
            *(str(KERNELS / "update.c"), "-o", str(target), "-lm"),
        ],
        check=True,
    )
    return target


def names_in(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as file:
        return file.getnames()


def main() -> int:
    for made_before in (DIST, ROOT / "build/lib"):  # setuptools would pack what it finds there
        shutil.rmtree(made_before, ignore_errors=True)
    kernels = []
    try:
        kernels = [compile_for(machine) for machine in PROCESSORS]
        subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    finally:
        for kernel in kernels:  # a working tree's would not follow its sources
            kernel.unlink()
    archives = sorted(DIST.iterdir())
    wanted = [f"roundpipe/kernels/{name}" for name in ("update.c", *(k.name for k in kernels))]
    wanted.append("troubleshooting.md")  # `explain` reads it
    missing = {
        archive.name: lacks
        for archive in archives
        if (lacks := [name for name in wanted if not _holds(archive, name)])
    }
    if missing or {archive.suffix for archive in archives} != {".whl", ".gz"}:
        print(f"error: {[archive.name for archive in archives]} lack {missing}", file=sys.stderr)
        return 1
    print(*archives, sep="\n")
    return 0


def _holds(archive: Path, name: str) -> bool:
    return any(held.endswith(name) for held in names_in(archive))


if __name__ == "__main__":
    sys.exit(main())
