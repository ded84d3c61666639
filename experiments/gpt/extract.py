# SPDX-License-Identifier: Apache-2.0
"""Text out of the formats that documentation comes in: dictd databases, man pages, POD, HTML, plain chapters."""

from __future__ import annotations

import gzip
import html.parser
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 78  # columns that refilled paragraphs are wrapped to


def read_text(path: Path) -> str:
    """The file as text; gunzipped when its name ends in .gz or .dz."""
    raw = gzip.open(path).read() if path.suffix in (".gz", ".dz") else path.read_bytes()
    return raw.decode("utf-8", errors="replace")


def tidy(text: str) -> str:
    """No control characters, no spaces at line ends, no more than one empty line in a row."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]", "", text.replace("\r\n", "\n").replace("\u00a0", " ").expandtabs())
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _fill(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


# --- dictd ------------------------------------------------------------------------------------------------------------

_DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def _dictd_number(text: str) -> int:
    value = 0
    for char in text:
        value = value * 64 + _DIGITS[char]
    return value


def dictionary(index: Path) -> Iterator[str]:
    """One document per entry of a dictd database (`NAME.index` beside `NAME.dict.dz`), in the order of the text."""
    body = gzip.open(index.with_suffix(".dict.dz")).read()
    entries = set()
    for line in index.read_text(encoding="utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        if not word.startswith("00"):  # 00-database-info and the like describe the database
            entries.add((_dictd_number(start), _dictd_number(length)))
    for start, length in sorted(entries):
        yield body[start : start + length].decode("utf-8", errors="replace")


# --- man pages --------------------------------------------------------------------------------------------------------

_GLYPHS = {"bu": "*", "em": "--", "en": "-", "lq": '"', "rq": '"', "oq": "'", "cq": "'", "aq": "'", "dq": '"', "co": "(C)",
           "ha": "^", "ti": "~", "rs": "\\", "mu": "x", "->": "->", "<-": "<-", "<=": "<=", ">=": ">=", "+-": "+-", "ga": "`"}
_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
_ESCAPE = re.compile(r'\\(?:f(?:\[[^]]*\]|\(..|.)|s[-+]?\d+|\((..)|\[([^]]*)\]|\*(?:\[([^]]*)\]|\((..)|(.))|".*$|'
                     r"[hvwkoD]'[^']*'|m\[[^]]*\]|(.))")


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        glyph = match.group(1) or match.group(2) or match.group(3) or match.group(4)
        if glyph:
            return _GLYPHS.get(glyph, "")
        char = match.group(6) or ""
        return {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", ".": "."}.get(char, "")
    return _ESCAPE.sub(one, text)


def _arguments(text: str) -> list[str]:
    return [quoted.replace('""', '"') if quoted else plain
            for quoted, plain in re.findall(r'"((?:[^"]|"")*)"?|(\S+)', text)]


def man_page(source: str) -> str:
    """A man(7) page as text; the empty string for redirects (.so) and for mdoc pages. Tables are left out."""
    if re.search(r"^\.(so|Dd) ", source, re.MULTILINE):
        return ""
    out: list[str] = []
    words: list[str] = []
    verbatim = skip_to = None

    def flush() -> None:
        if words:
            out.append(_fill(" ".join(words)))
            words.clear()

    for line in source.splitlines():
        if skip_to:
            skip_to = None if line.startswith(skip_to) else skip_to
            continue
        if not line.startswith((".", "'")):
            text = _unescape(line)
            if verbatim or not text.strip():
                flush()
                out.append(text)
            else:
                words.append(text.strip())
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("TS", "de", "ig"):
            skip_to = ".TE" if name == "TS" else ".."
        elif name in ("TH", "SH", "SS"):
            flush()
            heading = _arguments(_unescape(rest))
            out.append(f"\n{heading[0]}({heading[1]})" if name == "TH" and len(heading) > 1 else "\n" + " ".join(heading))
        elif name in ("PP", "P", "LP", "TP", "IP", "HP", "TQ", "sp", "br", "RS", "RE"):
            flush()
            if name not in ("br", "RS", "RE", "TQ"):
                out.append("")
            if name == "IP" and rest:
                words.append(_unescape((_arguments(rest) or [""])[0]))
        elif name in ("nf", "EX", "fi", "EE"):
            flush()
            verbatim = name in ("nf", "EX")
        elif name in _ALTERNATING or name in ("B", "I", "SM", "SB"):
            text = _unescape(("" if name in _ALTERNATING else " ").join(_arguments(rest)))
            if verbatim:
                out.append(text)
            else:
                words.append(text)
    flush()
    return "\n".join(out)


# --- POD, HTML, chapters ----------------------------------------------------------------------------------------------

_POD_CODE = re.compile(r"([BCEFILSXZ])(?:<<+ (.*?) >>+|<([^<>]*)>)", re.DOTALL)
_POD_ENTITY = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}


def pod(source: str) -> str:
    """Plain old documentation as text, with the formatting codes taken off; code outside POD is dropped."""
    def one(match: re.Match[str]) -> str:
        code, text = match.group(1), match.group(2) or match.group(3) or ""
        if code in "XZ":
            return ""
        if code == "E":
            return _POD_ENTITY.get(text, "")
        return text.partition("|")[0] if code == "L" else text

    out, active = [], source.lstrip().startswith("=")
    for block in re.split(r"\n\s*\n", source):
        block = block.strip("\n")
        if block.startswith("="):
            command, _, rest = block.partition(" ")
            active = command != "=cut"
            if not active or command in ("=encoding", "=over", "=back", "=for", "=begin", "=end", "=pod"):
                continue
            block = rest
        if active:
            for _ in range(3 if not block.startswith((" ", "\t")) else 0):  # codes nest
                block = _POD_CODE.sub(one, block)
            out.append(block)
    return "\n\n".join(out)


class _Page(html.parser.HTMLParser):
    BLOCKS = {"p", "div", "li", "dt", "dd", "tr", "table", "h1", "h2", "h3", "h4", "ul", "ol", "dl", "pre", "br", "hr"}
    DROPPED = {"script", "style", "head"}

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.words: list[str] = []
        self.stack: list[bool] = []  # of the open divs: does this one hide its text?
        self.dropped = self.pre = 0

    def flush(self) -> None:
        text = "".join(self.words)
        self.words.clear()
        if text.strip():
            self.out.append(text if self.pre else _fill(" ".join(text.split())))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self.flush()
        if tag == "div":
            self.stack.append(dict(attrs).get("class") in ("navheader", "navfooter", "toc"))
        self.dropped += tag in self.DROPPED
        self.pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.flush()
        if tag == "div" and self.stack:
            self.stack.pop()
        self.dropped -= tag in self.DROPPED
        self.pre -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if not self.dropped and not any(self.stack):
            self.words.append(data)


def html_page(source: str) -> str:
    """The running text of a page, without navigation and tables of contents; paragraphs refilled."""
    page = _Page()
    page.feed(source)
    page.close()
    page.flush()
    return "\n\n".join(page.out)


def chapters(source: str, heading: str) -> list[str]:
    """`source` cut before every line that the regular expression `heading` matches."""
    cuts = [match.start() for match in re.finditer(heading, source, re.MULTILINE)]
    return [source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)], strict=True)]
