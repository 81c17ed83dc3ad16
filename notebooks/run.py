"""Runs notebooks from top to bottom and stores what their cells print. Fails if a cell does, or
takes too long.

python notebooks/run.py                       # all of them
python notebooks/run.py notebooks/lora_finetune.ipynb
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
LIMIT_S = 180


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    elapsed_s = time.monotonic() - started
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # What libraries say on the way differs from machine to machine.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)
    print(f"{path.name}: {elapsed_s:.0f} s")
    if elapsed_s > LIMIT_S:
        sys.exit(f"error: {path.name} took {elapsed_s:.0f} s, at most {LIMIT_S} s are allowed")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        run(Path(name))
