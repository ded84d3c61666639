#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collects English text from Debian packages into one corpus file, cut into the documents it consists of.

    python3 experiments/gpt/collect.py --out experiments/gpt/corpus/corpus.bin.xz

Needs apt-get and dpkg (a Debian or Ubuntu system with package lists: run `apt-get update` first). Packages are unpacked
into a temporary folder; nothing is installed. A document is a dictionary entry, a man page, a manual page in POD, an HTML
page or a chapter. Exact duplicates and documents under --min-bytes are dropped; the rest is shuffled with --seed and the
last --held-out share of the bytes is held out. The same package versions and seed give the same documents in the same
order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import extract
from corpus import write_corpus


def _each(files: list[Path], convert: Callable[[str], str]) -> Iterator[str]:
    for path in files:
        yield convert(extract.read_text(path))


def _dictionary(root: Path) -> Iterator[str]:
    for index in sorted(root.glob("usr/share/dictd/*.index")):
        yield from extract.dictionary(index)


def _man(root: Path) -> Iterator[str]:
    return _each(sorted(root.glob("usr/share/man/man*/*.gz")), extract.man_page)


def _pod(root: Path) -> Iterator[str]:
    foreign = ("perlcn", "perljp", "perlko", "perltw")
    return _each([p for p in sorted(root.rglob("*.pod")) if p.stem not in foreign], extract.pod)


def _git(root: Path) -> Iterator[str]:
    return _each(sorted(root.glob("usr/share/doc/git-doc/**/*.txt")), str)


def _html(root: Path) -> Iterator[str]:
    return _each(sorted(root.glob("usr/share/doc/*/html/*.html")), extract.html_page)


def _chapters(pattern: str, heading: str) -> Callable[[Path], Iterator[str]]:
    def read(root: Path) -> Iterator[str]:
        for path in sorted(root.rglob(pattern)):
            yield from extract.chapters(extract.read_text(path), heading)
    return read


def _bible(root: Path) -> Iterator[str]:
    """The package keeps the text in a format of its own; the program in `bible-kjv` prints it."""
    program, = root.glob("usr/bin/bible")
    text = subprocess.run([program, "-p", root / "usr/lib", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=True).stdout
    return iter(extract.chapters(text, r"^[1-3]? ?[A-Z][A-Za-z ]+ \d+$"))


# what to unpack together, and how to read it
SOURCES: list[tuple[tuple[str, ...], Callable[[Path], Iterator[str]]]] = [
    (("dict-gcide",), _dictionary),
    (("dict-wn",), _dictionary),
    (("dict-foldoc",), _dictionary),
    (("dict-jargon",), _dictionary),
    (("dict-devil",), _dictionary),
    (("perl-doc",), _pod),
    (("git-doc",), _git),
    (("postgresql-doc-15",), _html),
    (("manpages",), _man),
    (("manpages-dev",), _man),
    (("debian-reference-en",), _chapters("debian-reference.en.txt.gz", r"^Chapter\s\d+\.\s")),
    (("debian-policy",), _chapters("policy.txt.gz", r"^\d+(\.\d+)?\. ")),
    (("developers-reference",), _chapters("developers-reference.txt.gz", r"^\d+(\.\d+)?\. ")),
    (("bible-kjv-text", "bible-kjv"), _bible),
]


def unpack(packages: tuple[str, ...], folder: Path) -> list[str]:
    """Downloads and unpacks the packages below `folder`; returns "name version" of each."""
    versions = []
    for package in packages:
        here = folder / "deb" / package
        here.mkdir(parents=True)
        done = subprocess.run(["apt-get", "download", "-q", package], cwd=here, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"package {package}: apt-get download failed; run `apt-get update`, or take it out of "
                             f"SOURCES in collect.py\n{done.stderr}")
        deb, = here.glob("*.deb")
        subprocess.run(["dpkg", "-x", deb, folder / "root"], check=True)
        version = subprocess.run(["dpkg-deb", "-f", deb, "Version"], capture_output=True, text=True, check=True)
        versions.append(f"{package} {version.stdout.strip()}")
    return versions


def collect(min_bytes: int) -> tuple[list[bytes], list[dict[str, object]]]:
    """Returns the documents in source order and one line of figures per source."""
    documents, seen, figures = [], set(), []
    for packages, read in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "root").mkdir()
            versions = unpack(packages, Path(folder))
            count, size = 0, 0
            for text in read(Path(folder) / "root"):
                document = extract.tidy(text).encode()
                key = hashlib.sha256(b" ".join(document.split())).digest()
                if len(document) < min_bytes or key in seen:
                    continue
                seen.add(key)
                documents.append(document)
                count, size = count + 1, size + len(document)
        figures.append({"packages": versions, "documents": count, "bytes": size})
        print(f"{', '.join(versions):70} {count:8,} documents {size / 1e6:7.2f} MB", flush=True)
        if count == 0:
            raise SystemExit(f"package {packages[0]}: no document found; its layout has changed, see its reader in collect.py")
    return documents, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "corpus/corpus.bin.xz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-bytes", type=int, default=96, help="shorter documents are dropped")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the bytes that is held out")
    args = parser.parse_args()
    if not 0 < args.held_out < 1:
        parser.error(f"--held-out {args.held_out}: a share between 0 and 1 is allowed")

    documents, figures = collect(args.min_bytes)
    random.Random(args.seed).shuffle(documents)
    total = sum(map(len, documents))
    kept, cut = 0, 0
    while kept < (1 - args.held_out) * total:
        kept += len(documents[cut])
        cut += 1
    write_corpus(args.out, documents[:cut], documents[cut:])

    packed = args.out.read_bytes()
    facts = {"bytes": total, "documents": len(documents), "held_out_bytes": total - kept,
             "held_out_documents": len(documents) - cut, "compressed_bytes": len(packed), "seed": args.seed,
             "sha256": hashlib.sha256(packed).hexdigest(), "sources": figures}
    args.out.with_suffix("").with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{total / 1e6:.1f} MB in {len(documents):,} documents ({total - kept:,} bytes held out), "
          f"{len(packed) / 1e6:.1f} MB compressed: {args.out}")


if __name__ == "__main__":
    main()
