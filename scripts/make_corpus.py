"""Make a JSONL corpus of English text from the documentation that every CPython carries."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

FILE = Path("models/corpus.jsonl")
SHORTEST, LONGEST = 1_000, 1_500  # characters of a text


def chunks(topic: str) -> Iterator[str]:
    """Yield whole paragraphs of ``topic`` in texts of roughly SHORTEST to LONGEST characters."""
    text = ""
    for paragraph in filter(str.strip, topic.rstrip().split("\n\n")):
        if text and len(text) + len(paragraph) + 2 > LONGEST:
            yield text
            text = ""
        text = f"{text}\n\n{paragraph}" if text else paragraph
        if len(text) >= SHORTEST:
            yield text
            text = ""
    if text:
        yield text


def main() -> None:
    from pydoc_data.topics import topics

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--texts", type=int, help="as many, evenly spread; default: all")
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for name in sorted(topics) for text in chunks(topics[name])]
    if args.texts:
        texts = texts[:: max(1, len(texts) // args.texts)][: args.texts]
    with args.file.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"wrote {args.file}: {len(texts)} texts, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
