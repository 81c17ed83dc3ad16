"""Every Python block of the guide runs, page by page from top to bottom, with a small checkpoint at
`path/to/model`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import ROOT
from tests.support.example_data import save_tokenizer

PAGES = [*sorted((ROOT / "docs/guide").glob("*.md")), ROOT / "docs/moving.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the page's reader."""
    model = tmp_path / "path/to/model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=18,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=2,
        pad_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    save_tokenizer(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run_in_their_order(page: Path) -> None:
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)
