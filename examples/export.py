r"""Merge an adapter into its base, and write the result as a GGUF file too if you like.

    python examples/export.py --adapter outputs/sft --base path/or/name \
        --output_dir outputs/merged --gguf outputs/model.gguf --gguf_dtype q8_0

The model is never loaded, so the machine needs room on its disk and hardly any memory. Start it
again after it was interrupted: it goes on with what is missing.
"""

import argparse
from collections.abc import Sequence

from needed import told_in_a_line
from roundpipe_hf import export_gguf, merge_and_save


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Merge an adapter into its base.")
    parser.add_argument("--adapter", required=True, help="the folder of a LoRA adapter")
    parser.add_argument("--base", required=True, help="a folder, or the name of a model on the Hub")
    parser.add_argument("--output_dir", required=True, help="a new folder for the merged model")
    parser.add_argument("--gguf", help="a new GGUF file with the merged model")
    parser.add_argument("--gguf_dtype", default="f16", choices=["f16", "q8_0"])
    args = parser.parse_args(argv)

    merge_and_save(args.adapter, args.base, args.output_dir)
    if args.gguf is not None:
        export_gguf(args.output_dir, args.gguf, dtype=args.gguf_dtype)


if __name__ == "__main__":
    with told_in_a_line():
        main()
